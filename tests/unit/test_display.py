"""The lines that a run on this machine prints."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.client.responses import QueueStat, Run
from penstock.config.loading import validate
from penstock_services.local import display
from penstock_services.local.display import LINE_EVERY_S, WAITING_AFTER_S, LineDisplay

QUEUE = QueueStat(**dict.fromkeys(QueueStat.model_fields, 0) | {"pending_prompts": 7, "queued": 5, "delivered": 3})
RUN = Run(
    run="test", step=0, policy_version=0, term=1, queue=QUEUE, metrics={}, servers=(), state="RUNNING",
    held_version=None, launcher_id="", detail="",
)  # fmt: skip


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
    clock[0] += WAITING_AFTER_S
    shown.say("scoring")
    assert lines(12, after_s=1) == ["scoring"], "the time without a line begins again"
