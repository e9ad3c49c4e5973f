"""The results of one part of the GPU benchmark, and its progress messages."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from harness import Bar, Measurement


def say(text: str) -> None:
    started = float(os.environ.get("PENSTOCK_BENCH_STARTED", time.time()))
    print(f"[{time.time() - started:6.1f} s] {text}", flush=True)


@dataclass
class Results:
    measurements: list[Measurement] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def add(self, name: str, unit: str, *values: float) -> None:
        self.measurements.append(Measurement(name, unit, list(values)))
        say(f"{name}: {self.measurements[-1].median:,.3f} {unit}")

    def bar(self, name: str, value: float, goal: float, at_most: bool = False) -> None:
        self.bars.append(Bar(name, value, goal, at_most))
        say(f"bar: {name}: {value:.3f}, goal {'≤' if at_most else '≥'} {goal:g}")
