"""The report of a finished demo: summary.json, plot.png and a table on the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.api.records import Run
from penstock.config.run import RunConfig
from penstock.diagnosis.terminal import sparkline

History = Sequence[dict[str, float]]


def read_history(folder: Path) -> list[dict[str, float]]:
    """Read the learner's metrics.jsonl: one dict per step. A line that is still being written is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def summarise(
    config: RunConfig, history: History, final: Run, score_start: float, score_end: float, seconds: float
) -> dict[str, Any]:
    """Summarise the whole run. Throughput is trained response tokens divided by the time spent in steps."""
    num_tokens = sum(row["response_tokens"] for row in history)
    training_s = sum(row["step_s"] for row in history)
    staleness = sum(row["staleness_mean"] * row["response_tokens"] for row in history)
    queue = final.queue
    return {
        "run": config.run,
        "score_start": round(score_start, 4),
        "score_end": round(score_end, 4),
        "seconds": round(seconds, 1),
        "steps": int(history[-1]["step"]) if history else 0,
        "policy_version": final.policy_version,
        "staleness_mean": round(staleness / max(num_tokens, 1), 3),
        "staleness_max": int(max((row["staleness_max"] for row in history), default=0)),
        "groups_trained": queue.trained,
        "tokens_per_second": round(num_tokens / max(training_s, 1e-9), 1),
        "in_flight_updates": int(max((row["in_flight_updates"] for row in history), default=0)),
        "mixed_version_trajectories": round(sum(row["mixed_version_ratio"] * row["num_sequences"] for row in history)),
        "conservation_error": queue.conservation_error,
        "training_seconds": round(training_s, 1),
        "engine": ", ".join(sorted({server.engine for server in final.servers})),
        "placement": config.learner.placement,
        "seed": config.seed,
    }


def write_plot(path: Path, history: History, summary: dict[str, Any]) -> None:
    """Plot reward, staleness and throughput over steps, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def series(name: str) -> list[float]:
        return [row[name] for row in history]

    steps = series("step")
    figure, axes = pyplot.subplots(3, 1, figsize=(8, 8), sharex=True, layout="constrained")
    rewards, staleness, rates = axes
    rewards.plot(steps, series("reward_mean"), color="tab:green", alpha=0.35, label="batch")
    rewards.plot(steps, _smooth(series("reward_mean"), 10), color="tab:green", label="mean of 10")
    if steps:
        scores = [summary["score_start"], summary["score_end"]]
        rewards.scatter([0, steps[-1]], scores, color="black", zorder=3, label="held-out")
    rewards.set(ylabel="reward", ylim=(0, 1.02))
    staleness.plot(steps, series("staleness_max"), color="tab:orange", alpha=0.35, label="max")
    staleness.plot(steps, series("staleness_mean"), color="tab:orange", label="mean")
    staleness.set(ylabel="staleness (versions)", ylim=(0, None))
    rates.plot(steps, series("tokens_per_second"), color="tab:blue", alpha=0.35, label="step")
    rates.plot(steps, _smooth(series("tokens_per_second"), 10), color="tab:blue", label="mean of 10")
    rates.set(ylabel="trained tokens/s", xlabel="step", ylim=(0, None))
    for axis in axes:
        axis.legend(loc="lower right")
        axis.grid(alpha=0.25)
    figure.suptitle(
        f"{summary['run']}: held-out {summary['score_start']:.2f} → {summary['score_end']:.2f} "
        f"in {summary['steps']} steps, {summary['seconds']:.0f} s"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def print_summary(config: RunConfig, summary: dict[str, Any], history: History) -> None:
    console = Console()
    table = Table(title="summary", show_header=False, min_width=60)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("held-out score", f"{summary['score_start']:.3f} → {summary['score_end']:.3f}", style="bold green")
    for label, key in (
        ("seconds", "seconds"), ("steps", "steps"), ("policy version", "policy_version"),
        ("groups trained", "groups_trained"), ("staleness, mean", "staleness_mean"),
        ("staleness, max", "staleness_max"),
        ("trained tokens/s", "tokens_per_second"), ("updates in flight", "in_flight_updates"),
        ("trajectories with several versions", "mixed_version_trajectories"),
        ("conservation error", "conservation_error"), ("engine", "engine"),
    ):  # fmt: skip
        table.add_row(label, str(summary[key]))
    console.print(table)
    console.print(f"reward {sparkline([row['reward_mean'] for row in history], 60)}", style="green")
    for name in ("plot.png", "summary.json"):
        console.print(str(config.folder / name), soft_wrap=True)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    means = []
    for index in range(len(values)):
        recent = values[max(0, index - window + 1) : index + 1]
        means.append(sum(recent) / len(recent))
    return means
