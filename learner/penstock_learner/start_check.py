"""`penstock learner --check`: finds the mistakes that can be found before Ray is started or joined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.config.algorithms import ADVANTAGE_NAMES, LOSS_NAMES, AlgorithmConfig
from penstock.config.gpu_bundles import num_gpus
from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, PenstockError, one_line
from penstock.internal_calls import ClusterKey, check_certificates
from penstock.start_checks import check_model, check_redis, check_roles, check_run_folder
from penstock_learner.checkpoints import CheckpointStore, CheckpointUploads, read_rewind
from penstock_learner.loggers.step_loggers import check_loggers
from penstock_learner.roles.profiling import check_profiler
from penstock_learner.roles.ray_address import FOUND_BY_RAY, check_cluster, find_cluster

REACH_S = 5.0
"""How long a check waits for the head of the Ray cluster."""


def check(config: RunConfig, *, with_ray: bool = True) -> str:
    """Raise ConfigError for the first mistake, or Unavailable for what cannot be reached. Returns a phrase that says
    from which weights the run would start, and what the Ray cluster to join has. What needs torch, whose import takes
    seconds, is checked last."""
    found = check_files(config)
    cluster = _check_ray(config) if with_ray else ""
    uploads = CheckpointUploads.of(config)
    newest = uploads.newest_first()[:1] if uploads is not None and config.learner.checkpoint.resume != "off" else []
    start = f"from {found[0].name}" if found else "from the model folder"
    if uploads is not None and newest > [path.name for path in found[:1]]:
        start = f"from {newest[0]} of {uploads.store.url}"
    _check_structure(config)
    try_functions(config.learner.algorithm, has_critic=config.learner.critic is not None)
    check_step(config.learner)
    return f"{start}; {cluster}" if cluster else start


def check_files(config: RunConfig) -> list[Path]:
    """The part of the check that needs neither torch nor anything outside of this process. Returns the checkpoints here
    that the run would continue from, the first choice first."""
    check_redis(config.redis)
    check_model(config)
    check_roles(config.learner)
    check_run_folder(config)
    ClusterKey.of(config).check()
    check_certificates(config.tls)
    check_loggers(config.learner.loggers)
    check_profiler(config.learner)
    checkpoint, folder = config.learner.checkpoint, config.folder / "checkpoints"
    rewind, is_done = read_rewind(folder)
    return CheckpointStore(folder, checkpoint.keep).candidates(checkpoint.resume, rewind if is_done else None)


def check_step(learner: LearnerConfig) -> None:
    if learner.step or learner.ahead:
        from penstock_learner.steps.program import load_program

        load_program(learner)
    for name, role in learner.roles.items():
        if role.is_own_class:
            from penstock_learner.roles.role_group import worker_of

            worker_of(learner, name)


def _check_ray(config: RunConfig) -> str:
    """Raise an error if a private Ray on this machine could not place the roles, or if the cluster to join cannot be
    reached or is too small. Returns what the cluster has; empty for a private Ray."""
    if config.learner.ray_address == FOUND_BY_RAY:
        config = config.changed({"learner.ray_address": find_cluster()})
    learner, roles = config.learner, config.learner.needed_roles
    if learner.ray_address:
        return check_cluster(learner, roles, REACH_S)
    if num_gpus(learner.placement, roles):
        import torch

        from penstock_learner.roles.ray_cluster import check_gpus

        check_gpus(learner, roles, torch.cuda.device_count())
    return ""


def _check_structure(config: RunConfig) -> None:
    """Raise ConfigError if the learner cannot use the model of a role, if engines could not load what it pushes, or if
    `learner.router` has no routers. No weights are loaded. A model that cannot be built without them is examined when
    it is loaded."""
    learner = config.learner

    from penstock_learner.model.architectures import path_of, require_causal, require_parallel
    from penstock_learner.model.expert_parallel import require_experts
    from penstock_learner.model.published_layout import fit_to_folder, model_without_weights
    from penstock_learner.model.routers import find_routers, require_routers

    for name, role in learner.needed_roles.items():
        section = "learner." if name == "policy" else f"learner.{'roles.' * (name in learner.roles)}{name}."
        own_folder = getattr(role, "path", None)
        model = require_causal(own_folder or config.model.path, f"{section}path" if own_folder else "model.path")
        require_parallel(model, path_of(model), learner.sequence_parallel_of(name), section)
    lm = model_without_weights(config.model.path)
    if lm is None:
        return
    fit_to_folder(lm, config.model.path, "model.path")
    require_experts(lm, learner.expert_parallel)
    if learner.router.is_used:
        require_routers(lm, find_routers(lm), replay=learner.router.replay)


def try_functions(algorithm: AlgorithmConfig, *, has_critic: bool) -> None:
    """Raise ConfigError if a user's advantage or loss cannot be imported, raises, or returns something of another
    shape, when it is called with a few tokens."""
    if algorithm.advantage.name in ADVANTAGE_NAMES and algorithm.loss.name in LOSS_NAMES:
        return
    import torch

    from penstock_learner.algorithms.advantages import AdvantageInputs, compute_advantages
    from penstock_learner.algorithms.losses import LossInputs, policy_loss

    mask = torch.tensor([1, 0, 1] * 4)
    sequence_ids = torch.arange(4).repeat_interleave(3)
    rewards = torch.tensor([0.0, 0, 1] * 2 + [0.0] * 6)
    values = torch.linspace(0, 1, 12) if has_critic else None
    is_greedy = torch.tensor([True, False] * 2) if algorithm.advantage.has_baseline else None
    parts = {key: torch.tensor([1.0, 0, 1, 0]) for key in algorithm.advantage.reward_keys}
    inputs = AdvantageInputs(rewards, mask, sequence_ids, torch.tensor([7, 7, 9, 9]), values, is_greedy, parts)
    log_probs = torch.linspace(-1, 0, 12, requires_grad=True)
    old = torch.full((12,), -0.5)
    losses = LossInputs(log_probs, old, rewards, mask, sequence_ids, old)
    if algorithm.advantage.name not in ADVANTAGE_NAMES:
        _try("advantage", algorithm.advantage.name, lambda: compute_advantages(inputs, algorithm.advantage))
    if algorithm.loss.name not in LOSS_NAMES:
        _try("loss", algorithm.loss.name, lambda: policy_loss(losses, algorithm.loss).per_token.sum().backward())


def _try(kind: str, name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except PenstockError:
        raise
    except Exception as error:
        raise ConfigError(
            f"learner.algorithm.{kind}.name: {name} fails on a small batch: {type(error).__name__}: {one_line(error)}"
        ) from error
