"""The facts about a run, and its state. The API, the metrics, the console and every command show `RunFacts.state`.

WAITING    no learner is ready to train yet, or no rollout server has joined yet; Run.detail says which
RUNNING    a learner is ready to train, and there are rollout servers
PAUSED     an operator, or the run itself, has paused leasing; Run.detail has the reason
STOPPED    an operator has stopped the run, or no learner is alive
FINISHED   the last step was made, or the dataset has ended
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from penstock.config.run import RunConfig
from penstock.feed.validation import evaluation_id
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.fleet import (
    SERVING_STATES,
    Fleet,
    OpenBreaker,
    Orders,
    PolicyRegistry,
    Quarantine,
    RunControl,
    ServerRecord,
)
from penstock.store.heartbeats import LEARNER, Heartbeats, Phases
from penstock.store.notices import Notices
from penstock.store.redis_client import RedisClient
from penstock.store.reports import FIRST_BATCH, READY_PHASES, Notice, Phase
from penstock.v1 import policies_pb2

RunState = Literal["WAITING", "RUNNING", "PAUSED", "STOPPED", "FINISHED"]
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
NO_LEARNER = "no learner is alive"
"""Detail of a run that is STOPPED without an order."""
PROCESS_STARTED = "starting its process"
"""Phase of a learner that `penstock up` has started and that has not reported anything yet."""
PROCESS_START_S = 180.0
"""How long a process may take to import its libraries. A learner that is silent for longer is not starting."""
NUM_RECENT_VERSIONS = 50
"""Versions whose metrics are read, since not every version has been made by a step."""


@dataclass(frozen=True)
class Validating:
    """A validation that servers are answering."""

    step: int
    num_finished: int
    num_prompts: int

    def __str__(self) -> str:
        what = f"the policy of step {self.step}" if self.step else "version 0 before the first step"
        return f"validating {what}: {self.num_finished}/{self.num_prompts} prompts"


@dataclass(frozen=True)
class RunFacts:
    """What Redis holds about a run at one moment, and the run's config."""

    config: RunConfig
    stat: QueueStat
    orders: Orders = Orders()
    pause_reason: str = ""
    """Why the run paused itself; empty if it did not, or is not paused."""
    servers: Sequence[ServerRecord] = ()
    drained: frozenset[str] = frozenset()
    """Servers that an operator has drained."""
    breakers: Mapping[str, OpenBreaker] = field(default_factory=dict)
    """Servers in the list that lease nothing because everything that they tried failed."""
    quarantines: Mapping[str, Quarantine] = field(default_factory=dict)
    """Servers in the list whose groups are not trained because their log-probs disagree with the learner's."""
    heartbeat_ages_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds since the last heartbeat of each component that is not a rollout server."""
    phases: Mapping[str, Sequence[Phase]] = field(default_factory=dict)
    """The phases of each process, oldest first."""
    learner_phase_age_s: float = 0.0
    """Seconds since the learner entered its newest phase."""
    policies: Sequence[policies_pb2.Policy] = ()
    """The newest versions, the newest first."""
    notices: Sequence[Notice] = ()
    """Newest first."""
    validation: Validating | None = None
    """The validation that runs now."""

    @cached_property
    def steps(self) -> Sequence[Mapping[str, float]]:
        """Metrics of the steps that made the newest versions, oldest first."""
        return [policy.metrics for policy in made_by_steps(self.policies)]

    @property
    def learner_phase(self) -> str:
        """The newest phase of the learner; empty if it has reported none."""
        phases = self.phases.get(LEARNER)
        return phases[-1].name if phases else ""

    @property
    def serving(self) -> list[ServerRecord]:
        return [server for server in self.servers if server.state in SERVING_STATES]

    @property
    def ages_s(self) -> dict[str, float]:
        return {**self.heartbeat_ages_s, **{s.server_id: s.heartbeat_age_ms / 1000 for s in self.servers}}

    @property
    def has_learner(self) -> bool:
        silence_s = self.config.replay.lease_ttl_s
        return self.heartbeat_ages_s.get(LEARNER, silence_s) < silence_s

    @property
    def is_learner_starting(self) -> bool:
        """Whether the newest learner process is not ready to train yet. At first it has no heartbeat."""
        name = self.learner_phase
        if self.has_learner:
            return name not in ("", FIRST_BATCH, *READY_PHASES)
        return name == PROCESS_STARTED and self.learner_phase_age_s < PROCESS_START_S

    @property
    def state(self) -> RunState:
        """Operators' orders count first, then what is alive."""
        if self.orders.is_paused:
            return "STOPPED" if self.orders.is_stopped else "PAUSED"
        if self.is_learner_starting:
            return "WAITING"
        if not self.has_learner:
            if 0 < self.config.learner.num_steps <= self.stat.step or self.stat.finished_step == self.stat.step:
                return "FINISHED"
            return "STOPPED" if self.stat.term else "WAITING"
        # A server that has crashed counts, until it leaves: its heartbeat tells.
        return "RUNNING" if any(server.state != "JOINING" for server in self.servers) else "WAITING"

    @property
    def state_detail(self) -> str:
        """Why the run is in its state, in a few words; empty if there is nothing to add."""
        if self.state == "PAUSED":
            return self.pause_reason
        if self.state == "WAITING":
            if self.is_learner_starting:
                return "the learner is starting"
            return "no rollout server has joined yet" if self.has_learner else "no learner has started yet"
        return NO_LEARNER if self.state == "STOPPED" and not self.orders.is_stopped else ""


@dataclass(frozen=True)
class RunStores:
    """Everything in Redis that describes one run."""

    queue: RedisReplayQueue
    fleet: Fleet
    heartbeats: Heartbeats
    control: RunControl
    policies: PolicyRegistry
    notices: Notices
    phases: Phases

    @classmethod
    def of(cls, client: RedisClient, config: RunConfig) -> RunStores:
        run = config.run
        return cls(
            RedisReplayQueue(client, run, config.replay), Fleet(client, run), Heartbeats(client, run),
            RunControl(client, run), PolicyRegistry(client, run), Notices(client, run), Phases(client, run),
        )  # fmt: skip

    async def read(self, config: RunConfig) -> RunFacts:
        stat, orders, servers = await self.queue.stat(), await self.control.orders(), await self.fleet.servers()
        known = {server.server_id for server in servers}
        breakers, quarantines = await self.control.open_breakers(), await self.control.quarantines()
        phases = await self.phases.by_component()
        return RunFacts(
            config=config,
            stat=stat,
            orders=orders,
            pause_reason=await self.control.pause_reason() if orders.is_paused else "",
            servers=servers,
            drained=await self.control.drained(),
            breakers={breaker.server_id: breaker for breaker in breakers if breaker.server_id in known},
            quarantines={name: quarantine for name, quarantine in quarantines.items() if name in known},
            heartbeat_ages_s=await self.heartbeats.ages_s(),
            phases=phases,
            learner_phase_age_s=await self.phases.age_s(phases[LEARNER][-1]) if LEARNER in phases else 0.0,
            policies=await self.policies.newest_first(None, NUM_RECENT_VERSIONS),
            notices=await self.notices.newest_first(),
            validation=await self._validation(config, stat),
        )

    async def _validation(self, config: RunConfig, stat: QueueStat) -> Validating | None:
        """The newest one that was begun, unless it is finished. While it runs, the learner may take as many steps as
        groups may be stale, and one more."""
        if config.dataset.validation.file is None:
            return None
        every, last = config.dataset.validation.every_steps, [stat.step] if stat.finished_step == stat.step else []
        newest = stat.step - stat.step % every
        oldest = max(0, min(newest, stat.step - config.replay.max_staleness - 1))
        for step in (*last, *range(newest, oldest - 1, -every)):
            found = await self.queue.evaluation_progress(evaluation_id(config.dataset.name, step))
            if found is not None:
                return Validating(step, *found) if found[0] < found[1] else None
        return None


def made_by_steps(policies: Iterable[policies_pb2.Policy]) -> list[policies_pb2.Policy]:
    """The versions that steps made, oldest first; `policies` come newest first. A step that was made again after a
    restart or a rewind is there once, as it was made last."""
    made: list[policies_pb2.Policy] = []
    for policy in policies:
        if "reward_mean" in policy.metrics and (not made or policy.step < made[-1].step):
            made.append(policy)
    return made[::-1]


def progress(step: int, num_steps: int) -> str:
    """`12/60`, or the step alone if there is no last step or it has been passed."""
    return f"{step}/{num_steps}" if num_steps > 0 and step <= num_steps else str(step)
