"""The lines that a run on this machine prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.api.records import Finding, QueueStat, Run
from penstock.config.loading import validate
from penstock.diagnosis import display
from penstock.diagnosis.display import LINE_EVERY_S, WAITING_AFTER_S, LineDisplay
from penstock.diagnosis.terminal import alarms, sparkline
from penstock_tools.local.supervisor import print_validations

QUEUE = QueueStat(**dict.fromkeys(QueueStat.model_fields, 0) | {"pending_prompts": 7, "queued": 5, "delivered": 3})
RUN = Run(
    run="test", step=0, policy_version=0, term=1, queue=QUEUE, metrics={}, servers=(), state="RUNNING",
    held_version=None, detail="",
)  # fmt: skip


def test_a_validation_is_printed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, printed = tmp_path / "validation.jsonl", {0}
    rows = [{"step": step, "score": step / 100, "pass_at": {"1": 0.25, "4": 0.5}} for step in (0, 25)]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 50')
    shown = LineDisplay(validate({"model": {"path": "m"}}, "test"))
    print_validations(results, shown, printed)
    print_validations(results, shown, printed)
    assert capsys.readouterr().out == "validation at step 25: mean 0.250  pass@1 0.250  pass@4 0.500\n"


def test_a_sparkline_has_room_for_every_value() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([-3.0, 0.0, 1.0], 10) == "▁▇█", "a reward may be negative"
    assert sparkline([0.0, 5.0, 10.0], 10) == "▁▅█", "or larger than 1"
    assert sparkline([], 10) == ""
    assert len(sparkline([0.5] * 100, 10)) == 10


def test_status_says_that_a_rewind_holds_the_servers_and_that_rewards_fail() -> None:
    assert alarms(RUN) == []
    [line] = alarms(RUN.model_copy(update={"held_version": 32}))
    assert "holds the servers at version 32" in line.plain and "`penstock policies release`" in line.plain
    [line] = alarms(RUN.model_copy(update={"metrics": {"reward_failed_ratio": 0.25}}))
    assert line.plain == "the reward failed on 25% of the samples of the newest step"


def history(step: int) -> list[dict[str, float]]:
    return [{"step": step, "reward_mean": 0.5, "staleness_mean": 1.0, "tokens_per_second": 2000.0}]


def test_a_line_every_ten_steps_and_for_steps_that_take_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock: Any = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    shown = LineDisplay(validate({"model": {"path": "m"}, "learner": {"num_steps": 40}}, "test"))

    def lines(step: int, after_s: float) -> list[str]:
        clock[0] += after_s
        shown.update(RUN, history(step) if step else [])
        return [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()]

    assert lines(0, after_s=1) == []
    assert lines(1, after_s=1) == ["step 1/40"]
    assert lines(9, after_s=1) == []
    assert lines(11, after_s=1) == ["step 11/40"]
    assert lines(12, after_s=LINE_EVERY_S) == ["step 12/40"]
    assert lines(12, after_s=LINE_EVERY_S) == []
    waiting = "no new step: 7 prompts pending, 0 in flight, 2 groups ready, 0 dead letters; servers: none"
    assert lines(12, after_s=WAITING_AFTER_S - LINE_EVERY_S) == [waiting]
    assert lines(12, after_s=1) == []
    validating = Finding(check="speed", level="OK", text="validating: 40/256", advice="", code="validation")
    clock[0] += WAITING_AFTER_S
    shown.update(RUN.model_copy(update={"speed_finding": validating}), history(12))
    assert capsys.readouterr().out == "validating: 40/256\n", "not a stall"
    clock[0] += WAITING_AFTER_S
    shown.print("scoring")
    assert lines(12, after_s=1) == ["scoring"], "the time without a line begins again"


def test_steps_of_an_earlier_start_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineDisplay(validate({"model": {"path": "m"}, "learner": {"num_steps": 40}}, "test"))
    shown.begin_at(25)
    for step in (25, 26, 27):
        shown.update(RUN, history(step))
    assert [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["step 26/40"]


def test_the_last_step_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown = LineDisplay(validate({"model": {"path": "m"}, "learner": {"num_steps": 12}}, "test"))
    shown.update_last(RUN, [])
    shown.update(RUN, history(8))
    for _ in range(2):
        shown.update_last(RUN, history(12))
    assert [line.partition("  ")[0] for line in capsys.readouterr().out.splitlines()] == ["step 8/12", "step 12/12"]
