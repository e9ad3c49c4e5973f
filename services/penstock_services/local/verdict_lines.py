"""When `penstock up` says why a run does not learn, or why it is slow.

A verdict of `penstock.verdicts` is a line once it has held for a while, and another one when it changes. Only a verdict
with advice is said, and that the reward rises again. `penstock top` and `penstock doctor` show every verdict at once.
"""

from __future__ import annotations

import time

from penstock.api.records import FIRST_BATCH, Part, Run, Verdict
from penstock.verdicts import FEW_STEPS, NEWEST_STEPS, SPEED_STEPS

SLOW_AFTER_S = 60.0
"""How long a verdict about the speed must hold. What servers do differs from second to second."""
NO_PROMPTS_AFTER_S = 5.0
"""How long nobody must have submitted prompts. The feed of a dataset needs a moment."""
REPEAT_AFTER_S = 600.0
"""How long the same verdict about the speed is not said again."""


class LearningLine:
    """Says why the reward does not rise: a failure after FEW_STEPS steps, everything else after NEWEST_STEPS. Steps of
    an earlier `penstock up` do not count."""

    def __init__(self, before: Run) -> None:
        self._first_step = before.step
        self._code, self._since_step = "", before.step
        self._said_code, self._said_step = "", before.step

    def new_lines(self, run: Run) -> list[str]:
        verdict = run.learning_verdict
        if verdict is None or run.state != "RUNNING":
            return []
        if verdict.code != self._code:
            self._code, self._since_step = verdict.code, run.step
        if verdict.code == self._said_code or run.step - self._since_step < FEW_STEPS:
            return []
        is_better = verdict.code == "rising" and self._said_code
        if not verdict.advice and not is_better:
            return []
        since = self._first_step if verdict.level == "FAIL" else max(self._first_step, self._said_step)
        if run.step - since < (FEW_STEPS if verdict.level == "FAIL" else NEWEST_STEPS):
            return []
        self._said_code, self._said_step = verdict.code, run.step
        return [f"learning: {_line(verdict)}"]


class NoPromptsLine:
    """Says that a learner waits for its first batch because nobody submits prompts, and how to submit some. Until more
    of them arrive it is said once."""

    def __init__(self) -> None:
        self._text, self._since_s, self._is_said = "", 0.0, False

    def new_lines(self, run: Run) -> list[str]:
        verdict = run.speed_verdict
        if verdict is None or not any(lacks_prompts(run, part) for part in run.parts):
            return []
        if verdict.text != self._text:
            self._text, self._since_s, self._is_said = verdict.text, time.monotonic(), False
        if self._is_said or time.monotonic() - self._since_s < NO_PROMPTS_AFTER_S:
            return []
        self._is_said = True
        return [_line(verdict)]


def lacks_prompts(run: Run, part: Part) -> bool:
    """Whether this part is a learner that waits for its first batch only because no prompts are pending."""
    is_waiting = part.phases[-1].name == FIRST_BATCH and run.state == "RUNNING"
    return is_waiting and run.speed_verdict is not None and run.speed_verdict.code == "prompts"


class SpeedLine:
    """Says what a slow run waits for, once it has waited for that for SLOW_AFTER_S."""

    def __init__(self, before: Run) -> None:
        self._first_step = before.step
        self._code, self._since_s = "", 0.0
        self._said_s: dict[str, float] = {}

    def new_lines(self, run: Run) -> list[str]:
        verdict, now_s = run.speed_verdict, time.monotonic()
        if verdict is None:
            return []
        if verdict.code != self._code:
            self._code, self._since_s = verdict.code, now_s
        elif self._is_due(run, verdict, now_s):
            is_new = now_s - self._said_s.get(verdict.code, -REPEAT_AFTER_S) >= REPEAT_AFTER_S
            self._said_s[verdict.code] = now_s
            return [f"speed: {_line(verdict)}"] if is_new else []
        return []

    def _is_due(self, run: Run, verdict: Verdict, now_s: float) -> bool:
        if run.state != "RUNNING" or not verdict.advice or now_s - self._since_s < SLOW_AFTER_S:
            return False
        if any(lacks_prompts(run, part) for part in run.parts):
            return False  # NoPromptsLine has said it
        return verdict.level != "OK" or run.step - self._first_step >= SPEED_STEPS


def _line(verdict: Verdict) -> str:
    return f"{verdict.text}; {verdict.advice}" if verdict.advice else verdict.text
