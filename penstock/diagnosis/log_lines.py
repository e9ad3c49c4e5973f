"""What `penstock up` and `penstock demo` print about a run, each once: the phases of its start, what goes wrong, and
why it does not learn or is slow, once that has held for a while. Nothing here waits or prints."""

from __future__ import annotations

import time
from collections.abc import Sequence

from penstock.api.records import Finding, Part, Phase, Run
from penstock.diagnosis import paused_finding
from penstock.diagnosis.facts import NO_LEARNER
from penstock.diagnosis.progress import MIN_TREND_STEPS, NEWEST_STEPS, SPEED_STEPS
from penstock.store.heartbeats import LEARNER
from penstock.store.reports import FIRST_BATCH, READY_PHASES

STILL_AFTER_S = 15.0
"""A phase that takes this long is mentioned again, and then after each further time of this length."""
PAUSED_STATES = ("PAUSED", "STOPPED")
PRINTED_BY_SUPERVISOR = "process_restarted"
"""The kind of notice that the supervisor itself records, and prints when it happens."""
SLOW_AFTER_S = 60.0
"""How long a finding about the speed must hold. What servers do differs from second to second."""
NO_PROMPTS_AFTER_S = 5.0
"""How long no prompts must have been submitted. The feed of a dataset needs a moment."""
REPEAT_AFTER_S = 600.0
"""How long the same finding about the speed is not printed again."""


class Announcements:
    """Turns reports of a run into lines. Notices of an earlier `penstock up` are repeated only if they happen again."""

    def __init__(self, before: Run, resume_command: str = "penstock runs resume") -> None:
        self.resume_command = resume_command
        self._counts = {(notice.kind, notice.text): notice.count for notice in before.notices}
        self._phases = {part.component: part.phases for part in before.parts}
        self._mentioned_s: dict[str, float] = {}
        self._pause: str | None = None
        """Why the run was paused in the newest report; None if it was not."""
        self._held = before.held_version
        self._broken: set[tuple[str, str]] = set()
        self._learning, self._speed = LearningLine(before), SpeedLine(before)

    def new_lines(self, run: Run) -> list[str]:
        return [
            *self._state_line(run), *self._held_line(run), *self._phase_lines(run), *self._notice_lines(run),
            *self._breaker_lines(run), *self._learning.new_lines(run), *self._speed.new_lines(run),
        ]  # fmt: skip

    def _state_line(self, run: Run) -> list[str]:
        is_ordered = run.state in PAUSED_STATES and run.detail != NO_LEARNER
        before, self._pause = self._pause, run.detail if is_ordered else None
        if self._pause is None or self._pause == before:
            return []
        why = f": {run.detail}" if run.detail else " by an operator"
        return [f"the run is paused{why}; `{self.resume_command}` continues it"]

    def _held_line(self, run: Run) -> list[str]:
        before, self._held = self._held, run.held_version
        if run.held_version == before:
            return []
        if run.held_version is None:
            return [f"the rewind has ended: servers get the current version again, not {before}"]
        return [run.rewind_text]

    def _phase_lines(self, run: Run) -> list[str]:
        lines, now_s = [], time.monotonic()
        for part in run.parts:
            new = _new_phases(part, self._phases.get(part.component, ()))
            self._phases[part.component] = part.phases
            lines += new
            if new:
                self._mentioned_s[part.component] = now_s
                continue
            silence_s = now_s - self._mentioned_s.get(part.component, now_s)
            is_starting = part.is_starting and run.state != "PAUSED" and not lacks_prompts(run, part)
            if is_starting and silence_s >= STILL_AFTER_S:
                self._mentioned_s[part.component] = now_s
                phase, found = part.phases[-1].name, run.speed_finding
                # A learner without a batch may wait for a validation.
                is_validating = phase == FIRST_BATCH and found is not None and found.code == "validation"
                lines.append(f"{part.component}: still {phase}{f'; {run.speed}' if is_validating else ''}")
        return lines

    def _notice_lines(self, run: Run) -> list[str]:
        lines = []
        for notice in reversed(run.notices):
            key = (notice.kind, notice.text)
            if notice.kind != PRINTED_BY_SUPERVISOR and notice.count > self._counts.get(key, 0):
                lines += [notice.text, *(f"    {line}" for line in notice.detail.splitlines())]
                self._counts[key] = 2**63  # whatever its count becomes, it is not printed again
        return lines

    def _breaker_lines(self, run: Run) -> list[str]:
        paused = [server for server in run.servers if server.breaker_reason]
        before, self._broken = self._broken, {(server.server_id, server.breaker_reason) for server in paused}
        return [
            paused_finding(server.server_id, server.breaker_failures, server.breaker_reason).line
            for server in paused
            if (server.server_id, server.breaker_reason) not in before
        ]


def waiting_for(run: Run, before: Run) -> str:
    """What the parts of a starting run are doing; empty once it trains. `before` was its status before the start."""
    new_parts = [part for part in run.parts if part not in before.parts]
    if run.speed_finding is not None and any(lacks_prompts(run, part) for part in new_parts):
        return run.speed_finding.text
    doing = [(part.component, part.phases[-1].name) for part in new_parts]
    if any(phase in READY_PHASES for component, phase in doing if component == LEARNER):
        return ""
    listed = ", ".join(f"{component}: {phase}" for component, phase in doing if phase not in READY_PHASES)
    return listed or "its processes import their libraries"


def _new_phases(part: Part, known: Sequence[Phase]) -> list[str]:
    """A line for each new phase, with the time that the one before it took."""
    lines = []
    for index, phase in enumerate(part.phases):
        if phase in known:
            continue
        took = ""
        if index:
            seconds = (phase.entered_at_ms - part.phases[index - 1].entered_at_ms) / 1000
            took = f" ({part.phases[index - 1].name}: {seconds:.1f} s)"
        lines.append(f"{part.component}: {phase.name}{took}")
    return lines


class LearningLine:
    """Tells why the reward does not rise: a failure after MIN_TREND_STEPS new steps, all else after NEWEST_STEPS."""

    def __init__(self, before: Run) -> None:
        self._first_step = before.step
        self._code, self._since_step = "", before.step
        self._printed_code, self._printed_step = "", before.step

    def new_lines(self, run: Run) -> list[str]:
        finding = run.learning_finding
        if finding is None or run.state != "RUNNING":
            return []
        if finding.code != self._code:
            self._code, self._since_step = finding.code, run.step
        if finding.code == self._printed_code or run.step - self._since_step < MIN_TREND_STEPS:
            return []
        is_better = finding.code == "rising" and self._printed_code
        if not finding.advice and not is_better:
            return []
        since = self._first_step if finding.level == "FAIL" else max(self._first_step, self._printed_step)
        if run.step - since < (MIN_TREND_STEPS if finding.level == "FAIL" else NEWEST_STEPS):
            return []
        self._printed_code, self._printed_step = finding.code, run.step
        return [f"learning: {finding.line}"]


def lacks_prompts(run: Run, part: Part) -> bool:
    """Whether this part is a learner that waits for its first batch only because no prompts are pending."""
    is_waiting = part.phases[-1].name == FIRST_BATCH and run.state == "RUNNING"
    return is_waiting and run.speed_finding is not None and run.speed_finding.code == "prompts"


class SpeedLine:
    """Tells what a slow run waits for, once it has waited for that for SLOW_AFTER_S. That a learner waits for its first
    batch because no prompts are submitted is printed after NO_PROMPTS_AFTER_S, with how to submit some."""

    def __init__(self, before: Run) -> None:
        self._first_step = before.step
        self._cause, self._since_s = "", 0.0
        self._printed_s: dict[str, float] = {}

    def new_lines(self, run: Run) -> list[str]:
        finding, now_s = run.speed_finding, time.monotonic()
        if finding is None:
            return []
        has_none = any(lacks_prompts(run, part) for part in run.parts)
        cause = finding.text if has_none else finding.code
        if cause != self._cause:
            self._cause, self._since_s = cause, now_s
        held_s = now_s - self._since_s
        if not (held_s >= NO_PROMPTS_AFTER_S if has_none else self._is_due(run, finding, held_s)):
            return []
        is_new = now_s - self._printed_s.get(cause, -REPEAT_AFTER_S) >= REPEAT_AFTER_S
        self._printed_s[cause] = now_s
        return [finding.line if has_none else f"speed: {finding.line}"] if is_new else []

    def _is_due(self, run: Run, finding: Finding, held_s: float) -> bool:
        if run.state != "RUNNING" or not finding.advice or held_s < SLOW_AFTER_S:
            return False
        return finding.level != "OK" or run.step - self._first_step >= SPEED_STEPS
