"""The state of a run, for every combination that operators meet."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from penstock.cli.commands.submit import submitted_line
from penstock.replay.queue_types import QueueStat
from penstock.run_state import (
    PROCESS_START_S,
    PROCESS_STARTED,
    RUN_STATES,
    RunFacts,
    has_servers,
    is_learner_starting,
    num_trained,
    progress,
    run_state,
    state_detail,
)
from penstock.store.fleet import ServerRecord
from penstock.store.phases import Phases
from penstock.store.run_control import Orders
from penstock.v1 import runs_pb2

PAUSED, STOPPED = Orders(is_paused=True), Orders(is_paused=True, stop_term=3, term=3)
RUNNING = RunFacts(
    step=18, num_steps=60, finished_step=-1, term=3, orders=Orders(term=3), has_learner=True, has_servers=True
)  # fmt: skip
STAT = QueueStat(**{field.name: 0 for field in fields(QueueStat)})


@pytest.mark.parametrize(
    ("changes", "state", "detail"),
    [
        ({}, "RUNNING", ""),
        ({"num_steps": 0}, "RUNNING", ""),
        ({"has_servers": False}, "WAITING", "no rollout server has joined yet"),
        ({"has_learner": False, "term": 0, "step": 0}, "WAITING", "no learner has started yet"),
        ({"has_learner": False}, "STOPPED", "no learner is alive"),
        ({"is_learner_starting": True}, "WAITING", "the learner is starting"),
        ({"is_learner_starting": True, "has_learner": False}, "WAITING", "the learner is starting"),
        ({"is_learner_starting": True, "finished_step": 18}, "WAITING", "the learner is starting"),
        ({"is_learner_starting": True, "orders": PAUSED}, "PAUSED", "why"),
        ({"has_learner": False, "step": 60}, "FINISHED", ""),
        ({"has_learner": False, "step": 63}, "FINISHED", ""),
        ({"has_learner": False, "step": 60, "num_steps": 0}, "STOPPED", "no learner is alive"),
        ({"has_learner": False, "finished_step": 18}, "FINISHED", ""),
        ({"has_learner": False, "finished_step": 17}, "STOPPED", "no learner is alive"),
        ({"finished_step": 18}, "RUNNING", ""),
        ({"step": 60}, "RUNNING", ""),
        ({"orders": PAUSED}, "PAUSED", "why"),
        ({"orders": PAUSED, "has_servers": False}, "PAUSED", "why"),
        ({"orders": PAUSED, "has_learner": False}, "PAUSED", "why"),
        ({"orders": STOPPED}, "STOPPED", ""),
        ({"orders": STOPPED, "has_learner": False}, "STOPPED", ""),
    ],
)
def test_the_state_and_why(changes: dict[str, Any], state: str, detail: str) -> None:
    facts = replace(RUNNING, **changes)
    assert (run_state(facts), state_detail(facts, pause_reason="why")) == (state, detail)


def test_the_api_has_the_same_states() -> None:
    assert set(RUN_STATES) == set(runs_pb2.Run.State.keys()) - {"STATE_UNSPECIFIED"}


def test_a_server_counts_once_its_engine_is_up() -> None:
    joining = ServerRecord("s", "a:1", "torch")
    assert not has_servers([]) and not has_servers([joining])
    assert has_servers([joining, replace(joining, state="STALE")])


def test_groups_of_finished_steps_count_as_trained_before_a_checkpoint_covers_them() -> None:
    stat = replace(STAT, step=18, delivered=80)
    assert num_trained(stat, groups_per_step=4) == 72, "two batches are read ahead"
    assert num_trained(replace(stat, trained=40, committed_step=10, delivered=40), groups_per_step=4) == 72
    assert num_trained(replace(stat, trained=72, committed_step=18, delivered=0), groups_per_step=4) == 72


@pytest.mark.parametrize(
    ("step", "num_steps", "text"), [(3, 60, "3/60"), (60, 60, "60/60"), (63, 60, "63"), (5, 0, "5")]
)
def test_progress_is_never_beyond_the_last_step(step: int, num_steps: int, text: str) -> None:
    assert progress(step, num_steps) == text


@pytest.mark.parametrize(
    ("num_replayed", "start", "end"),
    [(0, "submitted 4096 prompts, ids 1 to 4096", "4096"),
     (96, "submitted 4000 prompts,", "96 others were submitted before"),
     (4096, "nothing is new: all 4096 prompts were submitted before", "submit them again")],
)  # fmt: skip
def test_a_submission_says_what_is_new(num_replayed: int, start: str, end: str) -> None:
    line = submitted_line(4096, num_replayed, 1, 4096)
    assert line.startswith(start) and line.endswith(end)


@pytest.mark.parametrize(
    ("phase", "age_s", "is_alive", "is_starting"),
    [
        (None, 0, False, False), (None, 0, True, False),
        (PROCESS_STARTED, 5, False, True), (PROCESS_STARTED, 5, True, True),
        (PROCESS_STARTED, PROCESS_START_S + 1, False, False),
        ("loading the model into the ranks of policy", 500, True, True),
        ("loading the model into the ranks of policy", 5, False, False),
        ("waiting for the first batch", 5, True, False), ("training", 5, True, False), ("training", 5, False, False),
    ],
)  # fmt: skip
async def test_a_learner_is_starting_until_it_is_ready_to_train(
    phase: str | None, age_s: float, is_alive: bool, is_starting: bool
) -> None:
    class Recorded(Phases):
        def __init__(self) -> None:
            pass

        async def read_newest(self, component: str) -> tuple[str, float] | None:
            return (phase, age_s) if phase is not None and component == "learner" else None

    assert await is_learner_starting(Recorded(), is_alive) == is_starting
