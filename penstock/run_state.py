"""The state of a run. The API, the metrics, the console and every command show the one that `run_state` returns.

CREATED    waits for a launcher
WAITING    no learner is ready to train yet, or no rollout server has joined yet; Run.detail says which
RUNNING    a learner is ready to train, and there are rollout servers
PAUSED     an operator, or the run itself, has paused leasing; Run.detail has the reason
STOPPED    an operator has stopped the run, or no learner is alive
FINISHED   the last step was made, or the dataset has ended
FAILED     a process of a created run died
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.api.records import FIRST_BATCH, READY_PHASES
from penstock.replay.queue_types import QueueStat
from penstock.store.created_runs import CreatedState
from penstock.store.fleet import ServerRecord
from penstock.store.heartbeats import LEARNER
from penstock.store.phases import Phases
from penstock.store.run_control import Orders

RunState = Literal["CREATED", "WAITING", "RUNNING", "PAUSED", "STOPPED", "FINISHED", "FAILED"]
NO_LEARNER = "no learner is alive"
"""Detail of a run that is STOPPED without an order."""
LEARNER_STARTS = "the learner is starting"
PROCESS_STARTED = "starting its process"
"""Phase of a learner that `penstock up` has started and that has not said anything yet."""
PROCESS_START_S = 180.0
"""How long a process may take to import its libraries. A learner that says nothing for longer is not starting."""
RUN_STATES: tuple[RunState, ...] = get_args(RunState)
_CREATED_STATES: dict[CreatedState, RunState] = {
    "CREATED": "CREATED",
    "STOPPING": "STOPPED",
    "STOPPED": "STOPPED",
    "FINISHED": "FINISHED",
    "FAILED": "FAILED",
}


@dataclass(frozen=True)
class RunFacts:
    """What the state of a run depends on."""

    step: int
    num_steps: int
    """0 for a run without a last step."""
    finished_step: int
    """The step at which the learner has finished, because of `num_steps` or the end of the data; -1 if it never has."""
    term: int
    """0 before the first learner."""
    orders: Orders
    has_learner: bool
    """Whether the learner's heartbeat is recent."""
    has_servers: bool
    """Whether a rollout server has joined with an engine that is up."""
    is_learner_starting: bool = False
    """Whether the newest learner process is not ready to train yet: it loads the model, for example."""
    created: CreatedState | None = None
    """For a run that was created through a gateway: the launcher's state of it."""


def run_state(facts: RunFacts) -> RunState:
    """For a created run that is not up, the launcher's state. Then operators' orders count, then what is alive."""
    if facts.created is not None and facts.created != "STARTED":
        return _CREATED_STATES[facts.created]
    if facts.orders.is_paused:
        return "STOPPED" if facts.orders.is_stopped else "PAUSED"
    if facts.is_learner_starting:
        return "WAITING"
    if not facts.has_learner:
        if 0 < facts.num_steps <= facts.step or facts.finished_step == facts.step:
            return "FINISHED"
        return "STOPPED" if facts.term else "WAITING"
    return "RUNNING" if facts.has_servers else "WAITING"


def state_detail(facts: RunFacts, pause_reason: str) -> str:
    """Why the run is in its state, in a few words; empty if there is nothing to add."""
    state = run_state(facts)
    if facts.created not in (None, "STARTED"):
        return ""
    if state == "PAUSED":
        return pause_reason
    if state == "WAITING" and facts.is_learner_starting:
        return LEARNER_STARTS
    if state == "WAITING":
        return "no rollout server has joined yet" if facts.has_learner else "no learner has started yet"
    if state == "STOPPED" and not facts.orders.is_stopped:
        return NO_LEARNER
    return ""


def has_learner(heartbeat_ages_s: Mapping[str, float], silence_s: float) -> bool:
    """Whether the learner sent a heartbeat within the last `silence_s` seconds."""
    return heartbeat_ages_s.get(LEARNER, silence_s) < silence_s


async def is_learner_starting(phases: Phases, is_alive: bool) -> bool:
    """Whether the newest learner process is not ready to train yet. `is_alive` is what `has_learner` says: it has no
    heartbeat until it has imported its libraries."""
    newest = await phases.read_newest(LEARNER)
    if newest is None:
        return False
    name, age_s = newest
    if not is_alive:
        return name == PROCESS_STARTED and age_s < PROCESS_START_S
    return name not in (FIRST_BATCH, *READY_PHASES)


def has_servers(servers: Iterable[ServerRecord]) -> bool:
    """Whether a server is beyond JOINING. One that has crashed counts, until it leaves: its heartbeat tells."""
    return any(server.state != "JOINING" for server in servers)


def num_trained(stat: QueueStat, groups_per_step: int) -> int:
    """Groups that were trained, including those of steps that no checkpoint covers yet. The queue counts these as
    delivered."""
    return stat.trained + min(stat.delivered, max(0, stat.step - stat.committed_step) * groups_per_step)


def progress(step: int, num_steps: int) -> str:
    """`63/60` says nothing, so the last step is shown only while it is ahead: after `num_steps` was lowered, or without
    one, this is the step alone."""
    return f"{step}/{num_steps}" if num_steps > 0 and step <= num_steps else str(step)
