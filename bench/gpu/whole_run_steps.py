"""The steps of a whole run: when each ended, the tokens it trained on, and the figures of those after the warm-up."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from gpu_use import GpuSamples
from parts import save
from weights_results import Results, say
from whole_run_task import Task

from harness import Measurement

RATE = "response tokens over all steps"


@dataclass
class StepLog:
    """Collects the steps of one contender. Every new step saves the figures so far, so that a part which is cut off
    still reports."""

    task: Task
    gpu: GpuSamples
    started_at: float
    ended_at: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    """Mean staleness of each step's tokens, for a contender that generates beside training."""
    generated_rate: float | None = None
    """Tokens a second that the engine generated in the measured steps, if it generates beside training. It may be lower
    than the trained ones by those that were generated before."""

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
        if self.staleness:
            figures.append(Measurement("staleness of tokens", "steps", self.staleness[warm:]))
        if self.generated_rate is not None:
            figures.append(Measurement("response tokens that the engine generated", "tokens/s", [self.generated_rate]))
        figures.append(Measurement("first step after", "s", [self.ended_at[0] - self.started_at]))
        if self.gpu.percent:
            figures.append(Measurement("GPU busy", "%", [statistics.mean(self.gpu.percent[-int(sum(seconds)) :])]))
            figures.append(Measurement("GPU memory", "MB", [max(self.gpu.used_mb)]))
        results.measurements += figures
        return results

    def finish(self) -> Results:
        """The figures of a run that has ended, and whether it trained all steps."""
        results = self.results()
        results.bar("steps that were trained", len(self.tokens), self.task.num_steps)
        return results
