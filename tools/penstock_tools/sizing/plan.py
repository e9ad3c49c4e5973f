"""Memory, rates, push times and a forecast of a deployment, and the memory of a given configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from penstock.config.gpu_bundles import active_resource_groups
from penstock.config.learner import RoleConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput
from penstock_tools.sizing.hardware import USABLE_MEMORY, Gpu
from penstock_tools.sizing.memory import (
    MemoryUse,
    Role,
    Setup,
    Term,
    peak,
    role_moments,
    server_terms,
    tokens_of_a_rank,
    total,
)
from penstock_tools.sizing.models import HUB_IDS, ModelShape, find_shape
from penstock_tools.sizing.rates import GROUP_VARIATION, LONGEST_GROUP, Workload, push_s
from penstock_tools.sizing.search import Learners, Proposal, Task, server_choices
from penstock_tools.sizing.simulation import FleetModel, Forecast, simulate
from penstock_tools.starter import RoleGpus, shares_of_gpus

RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_SERVERS = 4096


@dataclass(frozen=True)
class RolePlan:
    role: str
    num_gpus: int
    """0 if it shares the GPUs of another role. For a rollout server, its tensor parallelism."""
    moments: tuple[MemoryUse, ...]
    """When its fullest rank needs the most memory. Empty if it needs no separate memory, or if this is not known."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Terms of the memory of its fullest GPU, when that is fullest."""
        return peak(self.moments).device if self.moments else ()

    @property
    def num_bytes(self) -> float:
        return total(self.terms)

    @property
    def host_bytes(self) -> float:
        return max((total(moment.host) for moment in self.moments), default=0.0)


@dataclass(frozen=True)
class Plan:
    """A deployment that fits: roles, servers, durations and what to expect."""

    task: Task
    proposal: Proposal

    @cached_property
    def roles(self) -> dict[Role, RolePlan]:
        """GPUs and memory of the learner's roles. A role that shares the GPUs of the role before it has none of its
        own; a reference that is the policy with its adapter switched off has no memory either."""
        task, learner = self.task, self.proposal.learner
        owners = [group[0] for group in task.groups_of(learner)]
        found = {}
        for role, shape in task.shapes.items():
            num_ranks = dict(learner.ranks).get(role, learner.policy_ranks)
            tokens = tokens_of_a_rank(
                learner.micro_batch_tokens, task.workload.longest_sequence, learner.sequence_parallel, role
            )
            moments = role_moments(role, shape, num_ranks, replace(learner.setup, micro_batch_tokens=tokens))
            found[role] = RolePlan(role, num_ranks if role in owners else 0, tuple(moments))
        return found

    @cached_property
    def server(self) -> RolePlan:
        utilization = self.proposal.learner.utilization or self.task.workload.gpu_memory_utilization
        return server_plan(self.task.policy, self.task.gpu, self.proposal.server.tensor_parallel, utilization)

    @property
    def server_tokens_per_s(self) -> float:
        server, workload = self.proposal.server, self.task.workload
        return server.concurrent_groups * workload.num_samples * workload.response_tokens / server.group_s

    @cached_property
    def durations(self) -> dict[str, Any]:
        """Seconds of a step without waiting, of the gather, of the whole push, and of the pause in decoding."""
        learner, task = self.proposal.learner, self.task
        size = self.proposal.server.tensor_parallel
        gather_s, whole_s, pause_s = push_s(
            task.policy, task.gpu, learner.policy_ranks, size, learner.setup, task.workload
        )
        return {"train_s": learner.train_s, "gather_s": gather_s, "push_s": whole_s, "pause_s": pause_s}

    @cached_property
    def forecast(self) -> Forecast:
        """It is simulated, so it differs a little from the proposal's pace."""
        server = self.proposal.server
        return simulate(
            FleetModel(
                num_servers=self.proposal.num_servers, concurrent_groups=server.concurrent_groups,
                group_s=server.group_s, groups_per_step=self.task.workload.groups_per_step,
                max_staleness=self.proposal.max_staleness, group_variation=GROUP_VARIATION,
                longest_group=LONGEST_GROUP, num_steps=40, **self.durations,
            )
        )  # fmt: skip

    @property
    def fields(self) -> dict[str, Any]:
        setup, server = self.proposal.learner.setup, self.proposal.server
        learner: dict[str, Any] = {"placement": self.proposal.learner.placement}
        ranks, shares = dict(self.proposal.learner.ranks), dict[str, RoleGpus]()
        for group in self.task.groups_of(self.proposal.learner):
            shares |= shares_of_gpus(tuple(group), ranks[group[0]])
        for name, role in shares.items():
            path = {"path": "/models/reward-model"} if name == "reward_model" else {}
            share = int(role.gpus_per_rank) if float(role.gpus_per_rank).is_integer() else role.gpus_per_rank
            learner[name] = {**path, "num_ranks": role.num_ranks, "gpus_per_rank": share}
        if "critic" in learner:
            learner["algorithm"] = {"advantage": {"name": "gae"}}
        learner["micro_batch_tokens"] = self.proposal.learner.micro_batch_tokens
        if setup.lora_rank:
            learner["lora"] = {"rank": setup.lora_rank, "alpha": 2 * setup.lora_rank}
        if setup.master_bytes == 2:
            learner["master_dtype"] = "bfloat16"
        switches = {"compile": setup.compiles, "cpu_offload": setup.cpu_offload}
        learner |= {name: True for name, is_on in switches.items() if is_on}
        engine = {"tensor_parallel_size": server.tensor_parallel}
        return {
            "learner": learner,
            "rollout": {"max_concurrent_groups": server.concurrent_groups, "engine": engine},
            "weights": {"staging": setup.staging},
        }

    def config(self, given: dict[str, Any]) -> dict[str, Any]:
        """The config of a run on this plan: `given`, with the fields that the search chose."""
        proposal, fields, written = self.proposal, self.fields, given.get("learner", {})
        for name in ("lora", "algorithm"):  # these are not chosen by the search
            if name in written:
                fields["learner"].pop(name, None)
        if "reward_model" in written:
            fields["learner"]["reward_model"].pop("path", None)
        utilization = proposal.learner.utilization or self.task.workload.gpu_memory_utilization
        chosen: dict[str, Any] = {
            "replay": {"max_staleness": proposal.max_staleness},
            "rollout": {"num_servers": proposal.num_servers, "engine": {"gpu_memory_utilization": utilization}},
            "learner": {
                "sequence_parallel": proposal.learner.sequence_parallel,
                "cpu_offload": proposal.learner.setup.cpu_offload,
            },
        }
        return merged(merged(given, fields), chosen)


def merged(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `other`, section by section."""
    result = dict(base)
    for name, value in other.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return result


def server_plan(model: ModelShape, gpu: Gpu, num_gpus: int, utilization: float) -> RolePlan:
    staged = Term("a version that is being received", "P x 2 B", 2.0 * model.num_parameters)
    terms = tuple(server_terms(model, num_gpus, gpu, utilization))
    return RolePlan("rollout", num_gpus, (MemoryUse("step", "decoding", terms, (staged,)),))


def smallest_plan(task: Task) -> Plan:
    """The first placement of a task with the fewest ranks on which the policy fits, as many ranks of the other roles as
    make a step cost the fewest GPU-seconds, and 10 % more servers than the learner's pace needs, so that it rarely
    waits for the last group of a step.

    If waiting for single groups makes the learner slower, additional servers would only be idle; then choose enough
    servers for the slower pace."""
    name, gpu, workload = task.policy.name, task.gpu.name, task.workload
    learners = Learners(task, len(task.shapes) * RANKS[-1] + 1, RANKS)
    offloads = workload.setup.cpu_offload
    found = ([*learners.of_policy(task.placements[0], num_ranks, 1, offloads=offloads)] for num_ranks in RANKS)
    fitting = next((choices for choices in found if choices), None)
    if fitting is None:
        raise InvalidInput("model", f"{name} does not fit on {RANKS[-1]} {gpu}; take larger GPUs")
    learner = min(fitting, key=lambda choice: choice.num_gpus * choice.train_s)
    server = next(server_choices(task, workload.gpu_memory_utilization, []), None)
    if server is None:
        raise InvalidInput("model", f"{name} leaves no room for a KV cache on {gpu}; take larger GPUs")

    def with_servers(groups_per_s: float) -> Plan:
        count = math.ceil(1.1 * groups_per_s * server.group_s / server.concurrent_groups)
        num_servers = min(MAX_SERVERS, max(1, count))
        return Plan(task, Proposal.of(task, learner, server, num_servers, workload.max_staleness))

    pace = with_servers(0).proposal.pace
    enough = with_servers(workload.groups_per_step / pace.learner_s)
    fewer = with_servers(enough.forecast.groups_per_s)
    return fewer if fewer.forecast.step_s <= 1.05 * enough.forecast.step_s else enough


# ── runs: what is to be placed, and the memory of a given configuration ──

ROLES: tuple[Role, ...] = ("policy", "reference", "critic", "reward_model")


def task_of(config: RunConfig, gpu: Gpu, defaults: Workload, given: Mapping[str, int]) -> Task:
    """The task of a run's configuration. A config only has the longest prompt and response: the means are the flags',
    or what `longest_sample` makes of them. Flags come before the config."""
    dataset, engine, learner = config.dataset, config.rollout.engine, config.learner
    if learner.roles:
        raise ConfigError(
            "--gpus cannot place the roles of learner.roles: their memory is not known; use --config alone"
        )
    longest_prompt = config.rollout.prompt.max_tokens or max(1, engine.max_model_len - dataset.max_tokens)
    numbers = {
        "groups_per_step": config.replay.groups_per_step,
        "num_samples": dataset.num_samples,
        "prompt_tokens": min(longest_prompt, defaults.prompt_tokens),
        "response_tokens": max(1, round(dataset.max_tokens / defaults.longest_sample)),
        "max_staleness": config.replay.max_staleness,
        "max_num_seqs": engine.max_num_seqs,
    } | dict(given)
    setup = replace(Setup.of(config), micro_batch_tokens=learner.micro_batch_tokens)
    needed = learner.needed_roles.keys() | ({"reference"} if learner.policy_is_reference else set())
    shapes = {role: find_shape(_model_of(config, getattr(learner, role))) for role in ROLES if role in needed}
    workload = replace(
        defaults, **numbers, longest_tokens=engine.max_model_len, setup=setup, epochs_per_step=learner.epochs_per_step,
        recomputes_log_probs=learner.recomputes_log_probs, gpu_memory_utilization=engine.gpu_memory_utilization,
    )  # fmt: skip
    return Task(shapes, gpu, workload)


def new_run(model: str, task: Task) -> dict[str, Any]:
    """A run with this workload. Its data and reward are for the user to add."""
    workload = task.workload
    kl: dict[str, Any] = {"placement": "none"}
    if "reference" in task.shapes:
        kl = {"placement": "loss", "penalty": "k3", "coefficient": 0.001}
    return {
        "run": "planned",
        "model": {"path": HUB_IDS.get(model.lower(), model), "dtype": "bfloat16"},
        "dataset": {
            "num_samples": workload.num_samples,
            "max_tokens": workload.longest_sequence - workload.prompt_tokens,
        },
        "replay": {"groups_per_step": workload.groups_per_step},
        "rollout": {"engine": {"max_model_len": workload.longest_sequence, "max_num_seqs": workload.max_num_seqs}},
        "learner": {"algorithm": {"kl": kl}},
    }


def _model_of(config: RunConfig, role: RoleConfig) -> str:
    own: Path | None = getattr(role, "path", None)
    return str(own or config.model.path)


@dataclass(frozen=True)
class GroupMemory:
    """The memory of the roles that share GPUs, on one of them."""

    roles: dict[str, RoleConfig]
    plans: tuple[RolePlan, ...]
    gpu: Gpu

    @property
    def num_bytes(self) -> float:
        return sum(plan.num_bytes for plan in self.plans)

    @property
    def fits(self) -> bool:
        """Whether the first rank of every role fits on the GPUs of its bundle."""
        num_gpus = max(1.0, sum(role.gpus_per_rank for role in self.roles.values()))
        return self.num_bytes <= num_gpus * self.gpu.memory_bytes * USABLE_MEMORY


def memory_of(config: RunConfig, gpu: Gpu) -> list[GroupMemory]:
    groups = active_resource_groups(config.learner.placement, config.learner.needed_roles)
    return [
        GroupMemory(group, tuple(_role_memory(config, name, role) for name, role in group.items()), gpu)
        for group in groups
    ]


def _role_memory(config: RunConfig, name: str, role: RoleConfig) -> RolePlan:
    """The memory of a role. A worker class of the user has no moments: what it holds is not known."""
    own = config.learner.roles.get(name)
    if own is not None and own.is_own_class:
        return RolePlan(name, role.num_ranks, ())
    shape = find_shape(_model_of(config, role))
    kind = cast(Role, name if own is None else own.worker)
    moments = role_moments(kind, shape, role.num_ranks, Setup.of(config, name))
    return RolePlan(name, role.num_ranks, tuple(moments))
