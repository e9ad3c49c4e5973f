"""The state of a run, for every combination that operators meet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.commands.submit import submitted_line
from penstock.diagnosis.facts import PROCESS_START_S, PROCESS_STARTED, RUN_STATES, RunStores, progress
from penstock.store.fleet import Orders, ServerRecord
from penstock.store.reports import Phase
from penstock.v1 import runs_pb2
from support.run_facts import STAT, run_facts

PAUSED, STOPPED = Orders(is_paused=True), Orders(is_paused=True, stop_term=3, term=3)
NO_LEARNER: dict[str, Any] = {"heartbeat_ages_s": {}}
STARTING: dict[str, Any] = {"phases": {"learner": [Phase(PROCESS_STARTED, 0)]}}


@pytest.mark.parametrize(
    ("changes", "state", "detail"),
    [
        ({}, "RUNNING", ""),
        ({"num_steps": 0}, "RUNNING", ""),
        ({"servers": []}, "WAITING", "no rollout server has joined yet"),
        ({**NO_LEARNER, "term": 0, "step": 0}, "WAITING", "no learner has started yet"),
        ({**NO_LEARNER}, "STOPPED", "no learner is alive"),
        ({**STARTING}, "WAITING", "the learner is starting"),
        ({**STARTING, **NO_LEARNER}, "WAITING", "the learner is starting"),
        ({**STARTING, "finished_step": 18}, "WAITING", "the learner is starting"),
        ({**STARTING, "orders": PAUSED}, "PAUSED", "why"),
        ({**NO_LEARNER, "step": 60}, "FINISHED", ""),
        ({**NO_LEARNER, "step": 63}, "FINISHED", ""),
        ({**NO_LEARNER, "step": 60, "num_steps": 0}, "STOPPED", "no learner is alive"),
        ({**NO_LEARNER, "finished_step": 18}, "FINISHED", ""),
        ({**NO_LEARNER, "finished_step": 17}, "STOPPED", "no learner is alive"),
        ({"finished_step": 18}, "RUNNING", ""),
        ({"step": 60}, "RUNNING", ""),
        ({"orders": PAUSED}, "PAUSED", "why"),
        ({"orders": PAUSED, "servers": []}, "PAUSED", "why"),
        ({"orders": PAUSED, **NO_LEARNER}, "PAUSED", "why"),
        ({"orders": STOPPED}, "STOPPED", ""),
        ({"orders": STOPPED, **NO_LEARNER}, "STOPPED", ""),
    ],
)
def test_the_state_and_why(changes: dict[str, Any], state: str, detail: str) -> None:
    """`num_steps` is of the config, and counts are of the queue."""
    counts = {name: changes.pop(name) for name in ("step", "term", "finished_step") if name in changes}
    sections = {"learner": {"num_steps": changes.pop("num_steps", 60)}}
    stat = replace(STAT, **{"step": 18, **counts})
    facts = run_facts((), sections, stat=stat, pause_reason="why", **changes)
    assert (facts.state, facts.state_detail) == (state, detail)


def test_the_api_has_the_same_states() -> None:
    assert set(RUN_STATES) == set(runs_pb2.Run.State.keys()) - {"STATE_UNSPECIFIED"}


def test_a_server_counts_once_its_engine_is_up() -> None:
    joining = ServerRecord("s", "a:1", "torch")
    assert run_facts(servers=[]).state == run_facts(servers=[joining]).state == "WAITING"
    assert run_facts(servers=[joining, replace(joining, state="STALE")]).state == "RUNNING"


def test_groups_of_finished_steps_count_as_trained_before_a_checkpoint_covers_them() -> None:
    stat = replace(STAT, step=18, delivered=80)
    assert stat.num_trained(4) == 72, "two batches are read ahead"
    assert replace(stat, trained=40, committed_step=10, delivered=40).num_trained(4) == 72
    assert replace(stat, trained=72, committed_step=18, delivered=0).num_trained(4) == 72


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
def test_a_learner_is_starting_until_it_is_ready_to_train(
    phase: str | None, age_s: float, is_alive: bool, is_starting: bool
) -> None:
    phases = {"rollout-0": [Phase(PROCESS_STARTED, 0)]} | ({} if phase is None else {"learner": [Phase(phase, 0)]})
    beats = {"learner": 0.5} if is_alive else {}
    facts = run_facts(phases=phases, learner_phase_age_s=age_s, heartbeat_ages_s=beats)
    assert facts.is_learner_starting == is_starting


@pytest.mark.parametrize(
    ("step", "finished_step", "begun", "shown"),
    [
        (0, -1, {0: (1, 8)}, 0), (30, -1, {25: (1, 8)}, 25), (30, -1, {25: (8, 8)}, None), (30, -1, {}, None),
        (25, -1, {24: (1, 8)}, None),
        (27, -1, {0: (8, 8)}, None), (30, 30, {30: (1, 8)}, 30), (30, 30, {25: (1, 8)}, 25),
    ],
)  # fmt: skip
async def test_the_newest_validation_that_was_begun_is_shown(
    step: int, finished_step: int, begun: dict[int, tuple[int, int]], shown: int | None
) -> None:
    assert await shown_validation(step, finished_step, begun, every_steps=25) == shown


async def test_a_validation_is_shown_while_the_learner_takes_the_steps_that_staleness_allows() -> None:
    running = {5: (1, 8), 4: (8, 8)}
    assert [await shown_validation(step, -1, running, every_steps=1) for step in (5, 7, 8)] == [5, 5, 5]


async def shown_validation(
    step: int, finished_step: int, begun: dict[int, tuple[int, int]], every_steps: int
) -> int | None:
    async def evaluation_progress(name: str) -> tuple[int, int] | None:
        return begun.get(int(name.rpartition("-")[2]))

    stores: Any = SimpleNamespace(queue=SimpleNamespace(evaluation_progress=evaluation_progress))
    config = run_facts((), {"dataset": {"validation": {"file": "v.jsonl", "every_steps": every_steps}}}).config
    found = await RunStores._validation(stores, config, replace(STAT, step=step, finished_step=finished_step))
    return None if found is None else found.step
