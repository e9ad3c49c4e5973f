"""Code that all benchmarks share: alternate the contenders in one run, take medians, judge bars, print and save.

The machine is shared and noisy, so no absolute time is judged. A bar is a ratio between two contenders whose rounds
alternate in the same run.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass
class Measurement:
    """The rates of one contender, one per round."""

    name: str
    unit: str
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.rates) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rates, n=4)
        if high == low:
            return 0.0
        return (high - low) / 2 / self.median if self.median else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the median, from order statistics. It assumes no distribution of the
        rates."""
        ordered, reach = sorted(self.rates), 0.98 * math.sqrt(len(self.rates))
        last = len(ordered) - 1
        return ordered[max(0, math.floor(last / 2 - reach))], ordered[min(last, math.ceil(last / 2 + reach))]


@dataclass(frozen=True)
class Bar:
    """A value that a benchmark must reach."""

    name: str
    value: float
    goal: float
    at_most: bool = False
    """True if smaller is better."""

    @property
    def ok(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def alternate(
    contenders: dict[str, Callable[[], float]], num_rounds: int, unit: str, between: Callable[[], None] | None = None
) -> dict[str, Measurement]:
    """Run every contender once per round, in turn, and in reverse order in every other round. Each returns its rate.

    A warm-up round is discarded. `between` is called before each round."""
    measured = {name: Measurement(name, unit) for name in contenders}
    for round_index in range(num_rounds + 1):
        if between is not None:
            between()
        for name in list(contenders)[:: -1 if round_index % 2 else 1]:
            rate = contenders[name]()
            if round_index > 0:
                measured[name].rates.append(rate)
    return measured


def ratios(name: str, ours: Measurement, limit: Measurement) -> Measurement:
    """The ratio within each round. Noise that affects both contenders cancels."""
    return Measurement(name, "", [a / b for a, b in zip(ours.rates, limit.rates, strict=True)])


def median_ratio(ours: Measurement, limit: Measurement) -> float:
    return ratios("", ours, limit).median


def earlier(name: str, measurements: list[Measurement], bars: list[Bar]) -> tuple[list[Measurement], list[Bar]]:
    """What results/NAME.json has besides these: the results of parts that were not measured this time."""
    path = RESULTS / f"{name}.json"
    result = json.loads(path.read_text()) if path.exists() else {"measurements": [], "bars": []}
    known = {m.name for m in measurements} | {bar.name for bar in bars}
    kept = [Measurement(m["name"], m["unit"], m["rates"]) for m in result["measurements"] if m["name"] not in known]
    judged = [
        Bar(bar["name"], bar["value"], bar["goal"], bar["at_most"])
        for bar in result["bars"]
        if bar["name"] not in known
    ]
    return kept, judged


def report(name: str, title: str, measurements: list[Measurement], bars: list[Bar], folder: Path | None = None) -> bool:
    """Print both tables, write NAME.json into the folder (results/), and return whether every bar is met."""
    console = Console()
    table = Table(title=title)
    for column in ("contender", "median", "spread", "unit"):
        table.add_column(column, justify="left" if column in ("contender", "unit") else "right")
    for m in measurements:
        table.add_row(m.name, f"{m.median:,.1f}" if m.median > 10 else f"{m.median:.4f}", f"±{m.spread:.0%}", m.unit)
    console.print(table)
    judged = Table(title="bars")
    for column in ("bar", "value", "goal", "met"):
        judged.add_column(column, justify="left" if column == "bar" else "right")
    for bar in bars:
        sign = "≤" if bar.at_most else "≥"
        judged.add_row(bar.name, f"{bar.value:.3f}", f"{sign} {bar.goal:g}", "yes" if bar.ok else "[red]no")
    console.print(judged)
    folder = folder or RESULTS
    folder.mkdir(exist_ok=True)
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "measurements": [
            {
                "name": m.name,
                "unit": m.unit,
                "median": m.median,
                "interval": m.interval,
                "spread": m.spread,
                "rates": [float(f"{rate:.5g}") for rate in m.rates],
            }
            for m in measurements
        ],  # fmt: skip
        "bars": [{"name": b.name, "value": b.value, "goal": b.goal, "at_most": b.at_most, "ok": b.ok} for b in bars],
    }
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    return all(bar.ok for bar in bars)
