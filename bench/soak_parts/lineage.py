"""The steps of a soak run, as its learner's log shows them, and where the time between them went.

A learner that rewinds to a checkpoint trains some steps again. The last time that a step was trained is the one that
the final weights contain: it is *effective*, and every earlier time was wasted.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak_parts.processes import Fault

_STEP = re.compile(r" INFO step (\d+) version \d+ .* ([\d.]+)s$")
MARKERS = {
    "imports": re.compile(r" INFO starting or joining Ray"),
    "Ray": re.compile(r" INFO Ray is ready"),
    "ranks": re.compile(r" INFO the roles are ready"),
    "take-over and checkpoint": re.compile(r" INFO training from step"),
}
"""Each phase of a learner's start ends with a line of its log."""
GRAVEST_FIRST = ("learner", "rank", "redis", "rollout-0", "rollout-1", "feed", "gateway")
AFTERMATH_S = 20.0
"""A slow step that begins within this time of a fault is charged to the fault."""


@dataclass(frozen=True)
class Trained:
    """One training of a step."""

    step: int
    seconds: float
    """Duration that the learner reports: waiting for the batch, training, gathering the weights."""
    at: float
    """When it ended."""


@dataclass
class Start:
    """One start of the learner process, up to its first step."""

    at: float
    phases: dict[str, float] = field(default_factory=dict)
    done_at: float = 0.0


@dataclass
class Lineage:
    """Reads the learner's log as it grows. Times are those at which a line was read."""

    log: Path
    trained: list[Trained] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    _position: int = 0

    def begin_start(self, at: float) -> None:
        self.starts.append(Start(at, done_at=at))

    def poll(self, now: float) -> None:
        if not self.log.exists():
            return
        with self.log.open("rb") as log:
            log.seek(self._position)
            new = log.read()
        new = new[: new.rfind(b"\n") + 1]
        self._position += len(new)
        for line in new.decode(errors="replace").splitlines():
            if match := _STEP.search(line):
                self.trained.append(Trained(int(match[1]), float(match[2]), now))
                self._end_phase("first step", now)
            for phase, marker in MARKERS.items():
                if marker.search(line):
                    self._end_phase(phase, now)

    def _end_phase(self, phase: str, now: float) -> None:
        """Record the time since the phase before. Only the first time counts: a learner may begin several terms."""
        if self.starts and phase not in self.starts[-1].phases and "first step" not in self.starts[-1].phases:
            start = self.starts[-1]
            start.phases[phase] = now - start.done_at
            start.done_at = now

    def effective(self) -> list[Trained]:
        """The last training of each step, in order. A step counts only if no later training went back before it."""
        kept: list[Trained] = []
        for trained in self.trained:
            while kept and kept[-1].step >= trained.step:
                kept.pop()
            kept.append(trained)
        return kept

    def phase_medians(self) -> dict[str, float]:
        """Median seconds of each phase over the learner's restarts."""
        restarts = [start for start in self.starts[1:] if "first step" in start.phases]
        names = [*MARKERS, "first step"]
        return {
            name: statistics.median(values)
            for name in names
            if (values := [start.phases[name] for start in restarts if name in start.phases])
        }


@dataclass(frozen=True)
class Account:
    """How the wall time of a soak was spent. `productive_s` and `rest` add up to `wall_s`."""

    wall_s: float
    num_effective: int
    num_repeated: int
    median_step_s: float
    productive_s: float
    """Number of effective steps, times the median duration of an effective step."""
    measured_s: float
    """Sum of the durations that the effective steps really took, including longer waits for groups."""
    rest: dict[str, float]
    """The other seconds, by cause. A negative number is time made up by steps that found their groups ready."""

    @property
    def ettr(self) -> float:
        return self.productive_s / self.wall_s if self.wall_s else 0.0

    @property
    def measured_ettr(self) -> float:
        return self.measured_s / self.wall_s if self.wall_s else 0.0


def make_account(lineage: Lineage, faults: Sequence[Fault], begun_at: float, ended_at: float) -> Account:
    """Account for the time between two moments. The end of each effective step closes one interval."""
    everything = [trained for trained in lineage.trained if begun_at < trained.at <= ended_at]
    effective = [trained for trained in lineage.effective() if begun_at < trained.at <= ended_at]
    median_s = statistics.median([trained.seconds for trained in effective]) if effective else 0.0
    rest: defaultdict[str, float] = defaultdict(float)
    before = begun_at
    for trained in effective:
        _charge(rest, before, trained.at, trained.at - before, median_s, trained.seconds, faults)
        before = trained.at
    rest[_cause(before, ended_at, faults) or "cut off at the end"] += ended_at - before
    return Account(
        wall_s=ended_at - begun_at,
        num_effective=len(effective),
        num_repeated=len(everything) - len(effective),
        median_step_s=median_s,
        productive_s=median_s * len(effective),
        measured_s=sum(trained.seconds for trained in effective),
        rest=dict(sorted(rest.items(), key=lambda item: -item[1])),
    )


def _charge(
    rest: dict[str, float], begun_at: float, ended_at: float, interval_s: float, median_s: float, step_s: float,
    faults: Sequence[Fault],
) -> None:  # fmt: skip
    """Charge what an interval took beyond the median step to the fault that explains it."""
    excess_s = interval_s - median_s
    cause = _cause(begun_at, ended_at, faults)
    if excess_s < 0:
        rest["made up from the queue"] += excess_s
    elif cause:
        rest[cause] += excess_s
    else:
        between_s = max(0.0, interval_s - step_s)
        rest["between steps: checkpoints, logs"] += min(excess_s, between_s)
        rest["slow steps without a fault"] += excess_s - min(excess_s, between_s)


def _cause(begun_at: float, ended_at: float, faults: Sequence[Fault]) -> str:
    """The gravest fault in the interval, or else the gravest one shortly before it."""
    for since in (begun_at, begun_at - AFTERMATH_S):
        found = [fault for fault in faults if since < fault.at <= ended_at]
        if found:
            gravest = min(found, key=lambda fault: GRAVEST_FIRST.index(fault.part))
            return f"after {gravest.part} {gravest.signal}"
    return ""
