"""The steps of a whole run: when each ended, the tokens it trained on, and the figures of those after the warm-up."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, fields

from harness import GpuSamples, Measurement, Results, save, say
from whole_run_parts.task import Task

RATE = "response tokens over all steps"
OVERHEAD = "share of the learner's working time outside forward, backward and optimizer"
OUTSIDE = "share of the learner's time outside forward, backward and optimizer, waiting included"
OVERHEAD_GOAL = 0.10
SERVER_IDLE = "share of the server's time in which it did not generate"
SERVER_IDLE_GOAL = 0.05
SERVER_PAUSED = "share of the server's time in which it was paused for new weights"
JUDGED_SHARES = {
    "0.5b": {SERVER_IDLE: SERVER_IDLE_GOAL},
    "1.5b": {SERVER_IDLE: SERVER_IDLE_GOAL, OVERHEAD: OVERHEAD_GOAL, OUTSIDE: OVERHEAD_GOAL},
}
"""The shares that are judged with each model. With 0.5B the learner waits for the server most of the time."""


@dataclass(frozen=True)
class LearnerTimes:
    """The times of a step by which the learner's shares are computed (docs/observability.md#shares-of-time)."""

    between_s: float
    step_s: float
    wait_s: float
    compute_s: float


LEARNER_TIMES = tuple(each.name for each in fields(LearnerTimes))


@dataclass
class StepLog:
    """Collects the steps of one contender. Every new step saves the figures so far, so that a part which is cut off
    still reports."""

    task: Task
    gpu: GpuSamples
    started_at: float
    is_judged: bool = True
    """Whether the shares of time have to reach their goals. Without overlap they cannot."""
    ended_at: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    """Mean staleness of each step's tokens, for a contender that generates during training."""
    generated_rate: float | None = None
    """Tokens a second that the engine generated in the measured steps, if it generates during training. It may be lower
    than the trained ones by those that were generated before."""

    learner_times: list[LearnerTimes] = field(default_factory=list)
    server_idle_share: float | None = None
    """Share of the measured steps in which the engine had no request, or was paused for new weights."""
    server_paused_share: float | None = None
    """The second part of it."""

    def add(self, at: float, tokens: float, phases: dict[str, float]) -> None:
        """Record that a step over `tokens` response tokens ended at `at`. `phases` are seconds of its parts."""
        before = self.ended_at[-1] if self.ended_at else self.started_at
        self.ended_at.append(at)
        self.tokens.append(tokens)
        self.phases.append(phases)
        described = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
        say(f"step {len(self.tokens)}: {at - before:.2f} s ({described}), {tokens:.0f} response tokens")
        if self.num_measured > 1:
            save(self.results())

    @property
    def num_measured(self) -> int:
        return max(0, len(self.tokens) - self.task.num_warm)

    @property
    def window(self) -> tuple[float, float]:
        """From the end of the last warm-up step to the end of the last step."""
        return self.ended_at[self.task.num_warm - 1], self.ended_at[-1]

    def results(self) -> Results:
        """The figures so far. There are none before the second measured step."""
        results = Results()
        if self.num_measured < 2:
            return results
        warm = self.task.num_warm
        seconds = [self.ended_at[i] - self.ended_at[i - 1] for i in range(warm, len(self.tokens))]
        rates = [tokens / step_s for tokens, step_s in zip(self.tokens[warm:], seconds, strict=True)]
        trained = sum(self.tokens[warm:]) / sum(seconds)
        figures = [
            Measurement(RATE, "tokens/s", [min(trained, self.generated_rate or trained)]),
            Measurement("response tokens of a step", "tokens/s", rates),
            Measurement("step", "s", seconds),
        ]
        for name in self.phases[-1]:
            figures.append(Measurement(f"step: {name}", "s", [phase[name] for phase in self.phases[warm:]]))
        if any(self.staleness):
            figures.append(Measurement("staleness of tokens", "steps", self.staleness[warm:]))
        if self.generated_rate is not None:
            figures.append(Measurement("response tokens that the engine generated", "tokens/s", [self.generated_rate]))
        figures += [Measurement(name, "", [share]) for name, share in self.shares().items()]
        figures.append(Measurement("first step after", "s", [self.ended_at[0] - self.started_at]))
        if self.gpu.percent:
            figures.append(Measurement("GPU busy", "%", [statistics.mean(self.gpu.percent[-int(sum(seconds)) :])]))
            figures.append(Measurement("GPU memory", "MB", [max(self.gpu.used_mb)]))
        results.measurements += figures
        return results

    def shares(self) -> dict[str, float]:
        """How the time of the measured steps was spent, for a contender that reports it."""
        found = {SERVER_IDLE: self.server_idle_share, SERVER_PAUSED: self.server_paused_share}
        shares = {name: share for name, share in found.items() if share is not None}
        times = self.learner_times[self.task.num_warm :]
        if times:
            wall_s = sum(each.between_s + each.step_s for each in times)
            wait_s, compute_s = (sum(getattr(each, name) for each in times) for name in ("wait_s", "compute_s"))
            shares[OVERHEAD] = 1 - compute_s / (wall_s - wait_s)
            shares["share of the learner's time in which it waited for groups"] = wait_s / wall_s
            shares[OUTSIDE] = 1 - compute_s / wall_s
        return shares

    def finish(self) -> Results:
        """The figures of a run that has ended, and whether it trained all steps."""
        results = self.results()
        goals = JUDGED_SHARES.get(self.task.model, {}) if self.is_judged else {}
        if self.num_measured > 1:
            shares = self.shares()
            for name, goal in goals.items():
                if name in shares:
                    results.bar(name, shares[name], goal, at_most=True)
        results.bar("steps that were trained", len(self.tokens), self.task.num_steps)
        return results
