"""When `penstock up` says why a run does not learn, or why it is slow."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.records import Finding, QueueStat, Run
from penstock.diagnosis import log_lines
from penstock.diagnosis.log_lines import REPEAT_AFTER_S, SLOW_AFTER_S, Announcements
from penstock.diagnosis.progress import MIN_TREND_STEPS, NEWEST_STEPS, SPEED_STEPS

RUN = Run(
    run="test", step=100, policy_version=100, term=1, queue=QueueStat(**dict.fromkeys(QueueStat.model_fields, 0)),
    metrics={}, servers=(), state="RUNNING", held_version=None, detail="",
)  # fmt: skip
FLAT = Finding(code="flat", level="WARN", text="reward 0.5 over 30 steps, flat", advice="read samples")
NO_SPREAD = Finding(code="no_spread", level="FAIL", text="100% of the groups have no spread", advice="other prompts")
RISING = Finding(code="rising", level="OK", text="reward 0.6, rising from 0.5 to 0.7", advice="")
GROUPS = Finding(code="groups", level="OK", text="the learner waits 60% of 2 s a step", advice="add servers")
KV_FULL = Finding(code="kv_full", level="WARN", text="the KV cache is full (97%)", advice="give more memory")
LEARNER = Finding(code="learner", level="OK", text="the learner is the bottleneck", advice="")


def after(num_steps: int, **changes: Any) -> Run:
    return RUN.model_copy(update={"step": 100 + num_steps, **changes})


class PrintedLines:
    """The lines of a run that continues at step 100, step by step."""

    def __init__(self) -> None:
        self.announcements = Announcements(RUN)
        self.step = 0

    def steps(self, num_steps: int, finding: Finding) -> dict[int, str]:
        """Make steps, each with this finding. Returns what was printed, by step."""
        lines = {}
        for _ in range(num_steps):
            self.step += 1
            new = self.announcements.new_lines(after(self.step, learning_finding=finding))
            lines |= dict.fromkeys([self.step] if new else [], "\n".join(new))
        return lines


def test_a_reward_that_stays_flat_is_printed_once_with_its_numbers() -> None:
    line = "learning: reward 0.5 over 30 steps, flat; read samples"
    assert PrintedLines().steps(200, FLAT) == {NEWEST_STEPS: line}


def test_a_failure_is_printed_after_few_steps() -> None:
    assert list(PrintedLines().steps(200, NO_SPREAD)) == [1 + MIN_TREND_STEPS]


def test_a_finding_that_changes_is_printed_again_and_so_is_a_reward_that_rises() -> None:
    printed = PrintedLines()
    assert printed.steps(100, RISING) == {}, "nothing was wrong before"
    assert len(printed.steps(30, FLAT)) == 1
    assert printed.steps(MIN_TREND_STEPS, NO_SPREAD) == {} and len(printed.steps(1, NO_SPREAD)) == 1
    assert printed.steps(50, RISING) == {printed.step - 50 + NEWEST_STEPS: f"learning: {RISING.text}"}
    assert printed.steps(20, FLAT) == {printed.step - 20 + 10: f"learning: {FLAT.text}; {FLAT.advice}"}, (
        "30 steps later"
    )


def test_a_trend_that_comes_and_goes_is_not_printed() -> None:
    printed = PrintedLines()
    for _ in range(20):
        assert printed.steps(MIN_TREND_STEPS - 1, FLAT) == printed.steps(3, RISING) == {}


def test_a_paused_run_and_one_of_an_older_gateway_have_no_finding() -> None:
    announcements = Announcements(RUN)
    for step in range(100):
        assert announcements.new_lines(after(step)) == []
    paused = [announcements.new_lines(after(step, state="PAUSED", learning_finding=FLAT)) for step in range(100)]
    assert [line for lines in paused[1:] for line in lines] == []


def test_a_slow_run_says_what_it_waits_for_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Any = [0.0]
    monkeypatch.setattr(log_lines.time, "monotonic", lambda: clock[0])
    announcements = Announcements(RUN)

    def lines(seconds: float, finding: Finding, num_steps: int = SPEED_STEPS) -> list[str]:
        begin, printed = announcements.new_lines(after(num_steps, speed_finding=finding)), list[str]()
        for _ in range(int(seconds)):
            clock[0] += 1
            printed += announcements.new_lines(after(num_steps, speed_finding=finding))
        return [*begin, *printed]

    assert lines(SLOW_AFTER_S - 1, KV_FULL, num_steps=0) == [], "not for long enough"
    assert lines(600, LEARNER) == [], "nothing to do about it"
    assert lines(600, KV_FULL, num_steps=0) == ["speed: the KV cache is full (97%); give more memory"]
    assert lines(600, GROUPS, num_steps=SPEED_STEPS - 1) == [], "the first steps wait for the start"
    assert lines(10, GROUPS) == ["speed: the learner waits 60% of 2 s a step; add servers"]
    assert lines(100, LEARNER) == lines(100, GROUPS) == [], "it comes and goes"
    assert lines(REPEAT_AFTER_S, LEARNER) == []
    assert len(lines(100, GROUPS)) == 1
