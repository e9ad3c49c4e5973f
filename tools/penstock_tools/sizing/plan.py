"""What `penstock plan` prints: a deployment, the result of a search, or the memory of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import indent
from typing import Any, cast

import yaml

from penstock.config.gpu_bundles import active_resource_groups, num_gpus
from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.machine import measure_memory
from penstock_tools.sizing.hardware import CPU_OTHERS_BYTES, CPU_PROCESS_BYTES, USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import (
    CONTEXT,
    PROCESS,
    MemoryUse,
    Role,
    Setup,
    peak,
    role_memory,
    saved_bytes,
    server_memory,
    total,
)
from penstock_tools.sizing.models import HUB_IDS, find_shape
from penstock_tools.sizing.rates import LONGEST_SAMPLE, TRAINED, Pace, PlanTask, Workload
from penstock_tools.sizing.search import Deployment, SearchResult
from penstock_tools.starter import shares_of_gpus

ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward_model")
_LIMITS = {
    "learner": "the learner is busy",
    "servers": "servers are busy",
    "staleness": "groups take long for this staleness",
}


def new_run(model: str, means: Mapping[str, Any]) -> dict[str, Any]:
    """A run of a model with the workload's defaults. Its data and reward are for the user to add."""
    workload = Workload(**means)
    longest = workload.prompt_tokens + round(LONGEST_SAMPLE * workload.response_tokens)
    return {
        "run": "planned",
        "model": {"path": HUB_IDS.get(model.lower(), model), "dtype": "bfloat16"},
        "dataset": {"num_samples": workload.num_samples, "max_tokens": longest - workload.prompt_tokens},
        "replay": {"groups_per_step": workload.groups_per_step},
        "rollout": {"engine": {"max_model_len": longest, "max_num_seqs": workload.max_num_seqs}},
        "learner": {"algorithm": {"kl": {"placement": "loss", "penalty": "k3", "coefficient": 0.001}}},
    }


def task_of(config: RunConfig, gpu: Gpu, means: Mapping[str, int], *, is_padded: bool = False) -> PlanTask:
    """The task of a run's configuration. A config only has the longest prompt and response: the means are the ones that
    are given, or what `LONGEST_SAMPLE` makes of them."""
    dataset, engine, learner = config.dataset, config.rollout.engine, config.learner
    if learner.roles:
        raise ConfigError(
            "--gpus cannot place the roles of learner.roles: their memory is not known; use --config alone"
        )
    if learner.expert_parallel > 1 or learner.shard_size:
        raise ConfigError("--gpus cannot choose learner.expert_parallel and learner.shard_size; use --config alone")
    longest_prompt = config.rollout.prompt.max_tokens or max(1, engine.max_model_len - dataset.max_tokens)
    needed = learner.needed_roles.keys() | ({"reference"} if learner.policy_is_reference else set())
    shapes = {role: find_shape(_model_of(config, getattr(learner, role))) for role in ROLES if role in needed}
    workload = Workload(
        groups_per_step=config.replay.groups_per_step, num_samples=dataset.num_samples,
        prompt_tokens=means.get("prompt_tokens") or min(longest_prompt, Workload.prompt_tokens),
        response_tokens=means.get("response_tokens") or max(1, round(dataset.max_tokens / LONGEST_SAMPLE)),
        longest_tokens=engine.max_model_len, max_staleness=config.replay.max_staleness,
        max_num_seqs=engine.max_num_seqs, gpu_memory_utilization=engine.gpu_memory_utilization,
        passes={role: learner.training_of(role).epochs_per_step for role in TRAINED},
        parts={role: learner.training_of(role).minibatches_per_step for role in TRAINED},
        recomputes_log_probs=learner.recomputes_log_probs,
        setup=replace(Setup.of(config), is_padded=is_padded),
    )  # fmt: skip
    return PlanTask(shapes, gpu, workload, pools={role: getattr(learner, role).pool for role in shapes})


def chosen_fields(found: Deployment) -> dict[str, Any]:
    """The fields of the configuration that a deployment decides."""
    setup, server = found.learner.setup, found.server
    shares = {role: vars(share) for roles, count in found.learner.groups
              for role, share in shares_of_gpus(roles, count).items()}  # fmt: skip
    for role in shares.keys() - {"policy"}:
        if (num_sharing := setup.num_sharing(role)) != found.task.workload.setup.num_sharing(role):
            shares[role] = shares[role] | {"sequence_parallel": num_sharing}
    return {
        "replay": {"max_staleness": found.max_staleness},
        "rollout": {
            "num_servers": found.num_servers, "max_concurrent_groups": server.concurrent_groups,
            "engine": {"tensor_parallel_size": server.tensor_parallel, "gpu_memory_utilization": found.utilization},
        },
        "learner": {
            "placement": found.learner.placement, **shares, "micro_batch_tokens": setup.micro_batch_tokens,
            "sequence_parallel": setup.sequence_parallel, "offload": setup.offload,
        },
        "weights": {"staging": setup.staging},
    }  # fmt: skip


# ── a deployment ──


def deployment_memory(found: Deployment) -> dict[str, list[MemoryUse]]:
    """When the fullest rank of each role and a server need the most memory."""
    task, learner = found.task, found.learner
    return {
        **{role: role_memory(role, shape, learner.ranks.get(role, learner.policy_ranks), learner.setup)
           for role, shape in task.shapes.items()},
        "rollout": [server_memory(task.policy, found.server.tensor_parallel, task.gpu, found.utilization)],
    }  # fmt: skip


def as_json(found: Deployment, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "placement": found.learner.placement, "gpus": found.num_gpus, "tokens_per_s": found.tokens_per_s,
        "step_s": found.pace.step_s, "staleness": found.pace.staleness, "config": run,
    }  # fmt: skip


def as_text(found: Deployment, run: dict[str, Any]) -> str:
    """GPUs by role with the items of their memory, rates, the pace and its reason, and the config to use."""
    learner, server, pace, model = found.learner, found.server, found.pace, found.task.policy
    gather_s, push_s, pause_s = found.push_s
    weights = (model.num_parameters, model.weights.largest_layer, model.weights.root, model.embedding_parameters)
    whole, layer, root, embedding = (f"{count / 1e9:.2f}e9" for count in weights)
    active = f", {model.active_parameters / 1e9:.2f}e9 of them active" if model.experts else ""
    rate = server.concurrent_groups * found.task.workload.group_tokens / server.group_s
    return "\n".join([
        f"{model.name} ({whole} parameters{active}) on {found.task.gpu.name}, {learner.placement}: "
        f"{found.num_gpus} GPUs",
        f"          P {whole} parameters, L {layer} in its largest layer, R {root} in embedding and head,",
        f"          E {embedding} in the embedding, N ranks",
        "",
        *(line for role, uses in deployment_memory(found).items() for line in _role_lines(role, uses, found)),
        "",
        f"rollout   {found.num_servers} servers x {server.tensor_parallel} GPU, {server.concurrent_groups} groups "
        f"at once, {server.group_s:.1f} s each: {found.num_servers * rate:,.0f} tokens/s",
        f"learner   {learner.train_s:.1f} s a step without waiting (micro-batches of "
        f"{learner.setup.tokens_of('policy')} tokens), {gather_s:.2f} s to gather the weights",
        f"push      {push_s:.2f} s, staged on the {learner.setup.staging}; decoding pauses {pause_s * 1000:.0f} ms",
        f"expect    {pace.step_s:.1f} s a step, {found.tokens_per_s:,.0f} trained tokens/s, staleness "
        f"{pace.staleness:.1f}; {_why(pace)}",
        *["          raise max_staleness or groups_per_step, or lower response_tokens"] * (pace.limit == "staleness"),
        f"basis     published figures of {found.task.gpu.name}, and efficiencies measured on one H200 (docs/sizing.md)",
        "",
        "config",
        indent(yaml.safe_dump(run, default_flow_style=None, sort_keys=False, width=110), "  ").rstrip(),
    ])  # fmt: skip


def _role_lines(role: str, uses: Sequence[MemoryUse], found: Deployment) -> list[str]:
    """Memory of a role's fullest GPU when it is fullest, item by item, and the peak of each phase."""
    if not uses:
        return [f"{role:<9} the policy with its adapter switched off: no further memory"]
    owners = {roles[0]: count for roles, count in found.learner.groups} | {"rollout": found.server.tensor_parallel}
    shared = next((roles[0] for roles, _ in found.learner.groups if role in roles), role)
    where = f"{owners[shared]} GPU" if shared == role else f"on the {shared}'s GPUs"
    fullest = peak(uses)
    memory = f"{total(fullest.device) / 1e9:.1f} of {found.task.gpu.memory_bytes / 1e9:.0f} GB"
    items = [f"  {each.name:<45} {each.num_bytes / 1e9:7.2f} GB  {each.formula}".rstrip() for each in fullest.device]
    return [f"{role:<9} {where}, {memory} ({fullest.what})", *items, f"  {_phases(uses)}"]


def _phases(uses: Sequence[MemoryUse]) -> str:
    phases = dict.fromkeys(use.phase for use in uses)
    peaks = [f"{phase} {total(peak(uses, phase).device) / 1e9:.1f}" for phase in phases]
    return f"{', '.join(peaks)} GB; {max(total(use.host) for use in uses) / 1e9:.1f} GB on the host"


def _why(pace: Pace) -> str:
    """What sets the pace, and who waits for it."""
    idle = (("learner", pace.learner_idle), ("servers", pace.servers_idle))
    waiting = [f"{name} idle {share:.0%}" for name, share in idle if share >= 0.005]
    return f"{_LIMITS[pace.limit]}: {', '.join(waiting)}" if waiting else _LIMITS[pace.limit]


# ── what a search found ──


def search_text(result: SearchResult, most: int) -> str:
    """A table of the best deployment and its alternatives, and what does not fit."""
    task, workload = result.best.task, result.best.task.workload
    columns = ("", "placement", "learner", "servers", "staleness", "GPUs", "tokens/s", "costs", "why")
    shown = {"best": result.best, **result.alternatives}
    rows = [columns, *(_row(change, found, result) for change, found in shown.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join([
        f"{task.policy.name} on at most {most} {task.gpu.name}: {workload.groups_per_step} groups of "
        f"{workload.num_samples} samples a step, prompts of {workload.prompt_tokens} and responses of "
        f"{workload.response_tokens} tokens on average, max_staleness at most {workload.max_staleness}",
        "",
        *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows),
        *["", "does not fit:"] * bool(result.refusals),
        *(f"  {refusal}" for refusal in result.refusals),
    ])  # fmt: skip


def _row(change: str, found: Deployment, result: SearchResult) -> tuple[str, ...]:
    learner = found.learner
    parts = [f"{' + '.join(roles)} {count}" for roles, count in learner.groups]
    if learner.setup.sequence_parallel > 1:
        parts.append(f"sequence_parallel {learner.setup.sequence_parallel}")
    if learner.setup.offload != "none":
        parts.append(f"offload {learner.setup.offload}")
    servers = f"{found.num_servers} x {found.server.tensor_parallel} GPU"
    if learner.utilization:
        servers = f"on the same GPU, {learner.utilization:.0%} of it"
    cost = "" if found is result.best else f"{result.cost(found):.1%}"
    return (change, learner.placement, ", ".join(parts), servers, str(found.max_staleness), str(found.num_gpus),
            f"{found.tokens_per_s:,.0f}", cost, _why(found.pace))  # fmt: skip


# ── the memory of a configuration ──


@dataclass(frozen=True)
class GroupMemory:
    """The memory of the roles that share GPUs, on one of them."""

    roles: dict[str, RoleConfig]
    uses: dict[str, list[MemoryUse]]
    """Empty for a worker class of the user: what it holds is not known."""
    gpu: Gpu

    @property
    def num_bytes(self) -> float:
        return sum(total(peak(uses).device) for uses in self.uses.values() if uses)

    @property
    def fits(self) -> bool:
        """Whether the first rank of every role fits on the GPUs of its bundle."""
        num_gpus = max(1.0, sum(role.gpus_per_rank for role in self.roles.values()))
        return self.num_bytes <= num_gpus * self.gpu.memory_bytes * USABLE_MEMORY


def memory_of(config: RunConfig, gpu: Gpu) -> list[GroupMemory]:
    return [
        GroupMemory(group, {name: _memory(config, name, role) for name, role in group.items()}, gpu)
        for group in active_resource_groups(config.learner.placement, config.learner.needed_roles)
    ]


def _memory(config: RunConfig, name: str, role: RoleConfig) -> list[MemoryUse]:
    own = config.learner.roles.get(name)
    if own is not None and own.is_own_class:
        return []
    kind = cast(Role, name if own is None else own.worker)
    on_host = frozenset({kind} if getattr(role, "offload", False) else ())
    sharing = frozenset({(kind, config.learner.sequence_parallel_of(name))})
    setup = replace(Setup.of(config), on_host=on_host, sharing=sharing)
    return role_memory(kind, find_shape(_model_of(config, role)), role.num_ranks, setup)


def checkpoint_bytes(config: RunConfig) -> float:
    """Bytes of one checkpoint: weights and Adam's state of every trained model."""
    learner = config.learner
    shards = {name: role.num_ranks for name, role in learner.needed_roles.items()}
    shards["policy"] = learner.shard_size or learner.policy.num_ranks
    roles = learner.needed_roles.items()
    return sum(shards[name] * saved_bytes(_memory(config, name, role)) for name, role in roles)


def _model_of(config: RunConfig, role: RoleConfig) -> str:
    return str(getattr(role, "path", None) or config.model.path)


def config_text(config: RunConfig, gpu: Gpu) -> tuple[str, bool]:
    """The memory of each role of a configuration and of the servers, and whether everything fits.

    A single server may be on the learner's only GPU: `penstock up` does that on a machine with one."""
    lines, groups, whole = [], memory_of(config, gpu), f"{gpu.memory_bytes / 1e9:.0f} GB"
    for group in groups:
        for name, role in group.roles.items():
            memory = _phases(group.uses[name]) if group.uses[name] else "memory not known"
            lines.append(f"{name:<13} {f'{role.num_ranks} x {role.gpus_per_rank:g} GPU':<12} {memory}")
        used = f"{group.num_bytes / 1e9:.1f} of {whole} on {gpu.name}, {_fit_text(group.fits)}"
        lines.append(f"  {' + '.join(group.roles)}: {used}")
    engine, num_servers = config.rollout.engine, config.rollout.num_servers
    size, shape = engine.tensor_parallel_size, find_shape(str(config.model.path))
    server = server_memory(shape, size, gpu, engine.gpu_memory_utilization).device
    cache_bytes, num_for_learner = server[-1].num_bytes, num_gpus(config.learner.placement, config.learner.needed_roles)
    lines += [
        f"{'rollout':<13} {f'{num_servers} x {size} GPU':<12} {total(server) / 1e9:.1f} of {whole} on {gpu.name}, "
        f"{cache_bytes / 1e9:.1f} of it KV cache, {_fit_text(cache_bytes > 0)}",
        f"GPUs          {num_for_learner} for the learner, {num_servers * size} for the servers",
    ]
    both = sum(group.num_bytes for group in groups) + total(server)
    if (num_for_learner, num_servers, size) == (1, 1, 1) and both <= gpu.memory_bytes * USABLE_MEMORY:
        lines.append(f"              or both on one GPU: {both / 1e9:.1f} of {whole}, fits")
    return "\n".join(lines), cache_bytes > 0 and all(group.fits for group in groups)


def cpu_text(config: RunConfig) -> tuple[str, bool]:
    """The memory of a configuration whose roles have no GPU, and whether this machine has it."""
    engine, num_servers = config.rollout.engine, config.rollout.num_servers
    weights = find_shape(str(config.model.path)).num_parameters * Setup.of(config).pushed_bytes
    server = 2 * weights + (engine.kv_cache_bytes or 0) + 2 * CPU_PROCESS_BYTES  # one version serves, one is received
    rows = [
        *((name, role.num_ranks, max(map(_on_cpu, _memory(config, name, role)), default=0.0))
          for name, role in config.learner.needed_roles.items()),
        ("rollout", num_servers, server), ("gateway, Redis, Ray", 1, CPU_OTHERS_BYTES),
    ]  # fmt: skip
    shown = [(name, f"{count} x {size / 1e9:.1f} GB" if size else "not known") for name, count, size in rows]
    whole, memory = sum(count * size for _, count, size in rows), measure_memory()
    fits = memory is None or whole <= memory.size_bytes
    size = f" of {memory.size_bytes / 1e9:.1f} GB, {_fit_text(fits)}" if memory else " GB"
    shown.append(("this machine", f"{whole / 1e9:.1f}{size}; no role has a GPU (--gpu NAME shows its memory on one)"))
    return "\n".join(f"{name:<20} {text}" for name, text in shown), fits


def _on_cpu(use: MemoryUse) -> float:
    """Bytes of a process without CUDA at a moment."""
    return CPU_PROCESS_BYTES + total([item for item in (*use.device, *use.host) if item.name not in (CONTEXT, PROCESS)])


def _fit_text(fits: bool) -> str:
    return "fits" if fits else "does not fit"
