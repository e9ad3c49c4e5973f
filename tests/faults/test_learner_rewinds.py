"""A learner rewinds to a checkpoint and is killed at every point: nothing is lost or trained twice in the weights.

The learner is the one of the chaos runs. It has no model: its weights count how often each prompt was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock_learner.checkpoints import read_state
from penstock_learner.crash_points import NAMES
from support.chaos.counted_run import DEADLINE_S, NUM_PROMPTS, CountedRun
from support.redis_server import RedisProcess

KILLED = -9


@pytest.fixture
def run(tmp_path: Path, redis_process: RedisProcess) -> Iterator[CountedRun]:
    run = CountedRun(tmp_path, redis_process)
    run.do(run.prepare())
    code, output = run.go(until_trained=NUM_PROMPTS // 2)
    assert code == 0, output
    yield run


def older_checkpoint(run: CountedRun) -> Path:
    newest, older = run.store.newest_first()
    assert read_state(older).step < read_state(newest).step
    return older


@pytest.mark.fault_row(
    "checkpoints", "killed just after a rewind", how="a crash point",
    must="the next learner goes on from the older checkpoint",
)  # fmt: skip
def test_a_learner_killed_just_after_it_rewound_is_continued(run: CountedRun) -> None:
    check_crash(run, "after_rewind")


@pytest.mark.fault_row(
    "checkpoints", "rewind, killed at {crash_at}", how="a named checkpoint, and a crash point",
    must="no group is lost or trained twice",
)  # fmt: skip
@pytest.mark.long
@pytest.mark.parametrize("crash_at", ["before_rewind", *NAMES])
def test_a_learner_that_rewinds_and_is_killed_is_continued(crash_at: str, run: CountedRun) -> None:
    check_crash(run, crash_at)


def check_crash(run: CountedRun, crash_at: str) -> None:
    older = older_checkpoint(run)
    before = run.stat()
    code, output = run.go(crash_at, rewind_to=str(older))
    assert code == KILLED, output
    if crash_at.endswith("rewind"):
        with pytest.raises(ConfigError, match="only Redis knows whether it did"):
            run.store.of_the_run()
    if crash_at == "before_rewind":
        assert run.stat().trained == before.trained
        code, output = run.go(rewind_to=str(older))
    else:
        code, output = run.go()  # a supervisor may start it again without the option
        assert "rewound to" not in output
    assert code == 0, output
    assert {read_state(path).resumed_from for path in run.store.newest_first()} == {str(older)}
    assert run.store.of_the_run() == run.store.newest_first()
    run.check_all_trained_once()


@pytest.mark.fault_row(
    "checkpoints", "rewind to an older checkpoint", how="it is named on purpose",
    must="it happens once, and only when asked",
)  # fmt: skip
def test_a_learner_rewinds_only_when_asked_and_only_once(run: CountedRun) -> None:
    older = older_checkpoint(run)
    newest, _ = run.store.newest_first()
    newest.rename(run.folder / newest.name)
    learner = run.start()
    code, output = learner.wait(DEADLINE_S), run.log.read_text()
    step, committed = read_state(older).step, read_state(run.folder / newest.name).step
    assert code == 1 and f"is at step {step}, but step {committed} is committed" in output, output
    term = run.stat().term
    (run.folder / newest.name).rename(newest)

    code, output = run.go(rewind_to=str(older), until_trained=NUM_PROMPTS - 8)
    assert code == 0 and "rewound to" in output, output
    assert run.stat().term == term + 1
    code, output = run.go(rewind_to=str(older))
    assert code == 0 and "rewound to" not in output, output
    run.check_all_trained_once()
