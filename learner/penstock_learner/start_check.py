"""`penstock learner --check`: finds the mistakes that can be found before Ray is started.

torch and transformers are imported only by the checks that need them.
"""

from __future__ import annotations

from penstock.config.algorithms import ADVANTAGE_NAMES, LOSS_NAMES, AlgorithmConfig
from penstock.config.gpu_bundles import num_gpus
from penstock.config.learner import LearnerConfig
from penstock.config.run import RunConfig
from penstock.start_checks import check_model, check_redis, check_roles, check_run_folder
from penstock.weights.cluster_key import ClusterKey
from penstock_learner.checkpoints.store import CheckpointStore, read_rewind
from penstock_learner.checkpoints.uploads import CheckpointUploads
from penstock_learner.loggers.step_loggers import check_loggers


def check(config: RunConfig) -> str:
    """Raise ConfigError for the first mistake. Returns a phrase that says from which weights the run would start."""
    check_redis(config.redis)
    check_model(config)
    _check_structure(config)
    check_roles(config.learner)
    for name, role in config.learner.needed_roles.items():
        if (own_folder := getattr(role, "path", None)) is not None:
            from penstock_learner.model.architectures import require_causal

            require_causal(own_folder, f"learner.{'roles.' if name in config.learner.roles else ''}{name}.path")
    _check_functions(config.learner.algorithm, has_critic=config.learner.critic is not None)
    check_step(config.learner)
    _check_gpus(config)
    check_run_folder(config)
    ClusterKey.of(config).check()
    check_loggers(config.learner.loggers)
    checkpoint = config.learner.checkpoint
    folder = config.folder / "checkpoints"
    rewind, is_done = read_rewind(folder)
    found = CheckpointStore(folder, checkpoint.keep).candidates(checkpoint.resume, rewind if is_done else None)
    uploads = CheckpointUploads.of(config)
    newest = uploads.newest_first()[:1] if uploads is not None and checkpoint.resume != "off" else []
    if uploads is not None and newest > [path.name for path in found[:1]]:
        return f"from {newest[0]} of {uploads.store.url}"
    return f"from {found[0].name}" if found else "from the model folder"


def check_step(learner: LearnerConfig) -> None:
    """Raise ConfigError if a step or a worker of the user's cannot be loaded."""
    if learner.step or learner.ahead:
        from penstock_learner.steps.program import load_program

        load_program(learner)
    for name, role in learner.roles.items():
        if role.is_own_class:
            from penstock_learner.roles.workers import worker_of

            worker_of(learner, name)


def _check_gpus(config: RunConfig) -> None:
    """Raise ConfigError if a private Ray on this machine could not place the roles."""
    roles = config.learner.needed_roles
    if not config.learner.ray_address and num_gpus(config.learner.placement, roles):
        import torch

        from penstock_learner.roles.ray_cluster import check_gpus

        check_gpus(config.learner, roles, torch.cuda.device_count())


def _check_structure(config: RunConfig) -> None:
    """Raise ConfigError if the learner cannot train the model, if engines could not load what it pushes, or if
    `learner.router` has no routers. No weights are loaded. A model that cannot be built without them is examined when
    it is loaded."""
    learner = config.learner

    from penstock_learner.model.architectures import path_of, require_causal, require_parallel
    from penstock_learner.model.published_layout import fit_to_folder, model_without_weights
    from penstock_learner.model.routers import find_routers, require_routers

    model = require_causal(config.model.path, "model.path")
    require_parallel(model, path_of(model), learner.sequence_parallel)
    lm = model_without_weights(config.model.path)
    if lm is None:
        return
    fit_to_folder(lm, config.model.path, "model.path")
    if learner.router.is_used:
        require_routers(lm, find_routers(lm), replay=learner.router.replay)


def _check_functions(algorithm: AlgorithmConfig, *, has_critic: bool) -> None:
    """Raise ConfigError if the user's advantage or loss does not work. Ours do."""
    if algorithm.advantage.name not in ADVANTAGE_NAMES or algorithm.loss.name not in LOSS_NAMES:
        from penstock_learner.algorithms.trial import try_functions

        try_functions(algorithm, has_critic=has_critic)
