"""`penstock plot`: draw the metrics of runs from their folders. The demo draws its `plot.png` with it too."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from penstock.cli.connection import run_folder
from penstock.cli.parser import Parser, did_you_mean, whole_number
from penstock.errors import ConfigError, InvalidInput
from penstock.step_history import METRICS, VALIDATIONS, read_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

OUTPUT = Path("plot.png")
REWARD = "reward_mean"
MAX_RUNS, MAX_COLUMNS = 20, 4
PANEL_INCHES = (4.2, 2.9)
SMOOTHED_STEPS = 10
FAINT = 0.3
EXACT = ("lr",)
"""Metrics without noise, which are not smoothed."""


LABELS = {
    REWARD: "reward",
    "response_length_mean": "response length (tokens)",
    "truncated_ratio": "share of cut responses",
    "entropy": "entropy (nats)",
    "kl_reference": "KL to the reference (nats)",
    "kl_behaviour": "KL to the behaviour policy (nats)",
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "logprob_mismatch": "log-prob mismatch (nats)",
    "staleness_mean": "staleness (versions; faint: oldest token)",
    "tokens_per_second": "trained tokens/s",
    "generation_tokens_per_second": "generated tokens/s of a busy server",
    "log_probs_tokens_per_second": "tokens/s of the policy's log-probs",
    "reference_tokens_per_second": "tokens/s of the reference",
    "update_tokens_per_second": "tokens/s of the update",
    "push_bytes_per_second": "bytes/s of a push",
    "memory_peak_gib": "peak memory of a rank (GiB)",
    "mfu": "model FLOPs over peak",
    "step_s": "seconds of a step",
    "wait_s": "seconds waiting for a batch",
    "forward_s": "seconds of forward passes",
    "update_s": "seconds of the update",
    "compare_s": "seconds comparing servers",
    "gather_s": "seconds gathering weights",
}
"""What is drawn by default, in this order."""


FAINT_METRICS = {"staleness_mean": "staleness_max"}
"""Metrics that are drawn faintly behind another one, instead of its values in single steps."""


@dataclass(frozen=True)
class Panel:
    """A metric of metrics.jsonl, by step or by time. The panel of the reward also has the scores of validations."""

    metric: str
    by_time: bool = False


@dataclass(frozen=True)
class RunHistory:
    """What a run's folder has about its steps."""

    name: str
    steps: Sequence[Mapping[str, float]]
    scores: Mapping[int, float] = field(default_factory=dict)
    """Held-out score by step."""

    @classmethod
    def read(cls, folder: Path, name: str) -> RunHistory:
        from penstock.feed.validation import read_results

        scores = {int(result["step"]): float(result["score"]) for result in read_results(folder / VALIDATIONS)}
        return cls(name, read_steps(folder), dict(sorted(scores.items())))

    def points(self, metric: str, by_time: bool) -> tuple[list[float], list[float]]:
        """Where the metric is known: steps, or seconds of training, and its values."""
        known = {int(step["step"]): step[metric] for step in self.steps if math.isfinite(step.get(metric, math.nan))}
        return self._placed(known, by_time)

    def score_points(self, by_time: bool) -> tuple[list[float], list[float]]:
        return self._placed(self.scores, by_time)

    def _placed(self, values: Mapping[int, float], by_time: bool) -> tuple[list[float], list[float]]:
        places = self.seconds if by_time else {step: float(step) for step in values}
        known = [step for step in values if step in places]
        return [places[step] for step in known], [values[step] for step in known]

    @property
    def seconds(self) -> dict[int, float]:
        """When each step ended, in seconds of training. The time in which the run was stopped does not count."""
        durations = [step.get("step_s", math.nan) + step.get("between_s", 0.0) for step in self.steps]
        ends = accumulate(durations, initial=0.0)
        return dict(zip((0, *(int(step["step"]) for step in self.steps)), ends, strict=True))


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if len(args.runs) > MAX_RUNS:
        raise InvalidInput("RUN", f"{len(args.runs)} runs are too many for one picture; give at most {MAX_RUNS}")
    folders = [run_folder(run, METRICS, VALIDATIONS) for run in args.runs]
    names = [folder.resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else args.runs
    runs = [RunHistory.read(folder, label) for folder, label in zip(folders, labels, strict=True)]
    panels = _panels(runs, args)
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if args.output.suffix.removeprefix(".") not in formats:
        raise InvalidInput("--output", f"{args.output} must end in .{', .'.join(sorted(formats))}")
    draw(args.output, runs, panels, smooth=args.smooth)
    print(args.output)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="penstock plot",
        description="Draw the metrics of runs, each run as a line: reward, held-out score, response length, entropy, "
        "KL, gradient norm, staleness, throughput, seconds by phase and more. The runs need not be up.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="name of a run in runs/, or its folder")
    parser.add_argument(
        "--metrics", metavar="A,B", type=lambda text: text.split(","),
        help="draw these numbers of metrics.jsonl instead; docs/metrics.md lists them",
    )  # fmt: skip
    parser.add_argument("--by", choices=("step", "time"), help="what is on the x axis (default: step; reward has both)")
    parser.add_argument(
        "--smooth", type=whole_number(1), default=SMOOTHED_STEPS, metavar="N",
        help="draw the mean of N steps, and single steps faintly (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, metavar="FILE",
        help="picture to write; its ending chooses the format: png, svg, pdf (default: %(default)s)",
    )  # fmt: skip
    return parser


def _panels(runs: Sequence[RunHistory], args: argparse.Namespace) -> list[Panel]:
    """The panels that have data. Prints which others were wanted. Raises ConfigError if none has data."""
    known = {name for run in runs for step in run.steps for name in step}
    found = {name for name in known if any(run.points(name, False)[0] for run in runs)}
    if any(run.scores for run in runs):
        found.add(REWARD)
    wanted = list(dict.fromkeys(args.metrics or LABELS))
    missing = [name for name in wanted if name not in found]
    hints = [did_you_mean(name, sorted(found)) for name in missing] if args.metrics else []
    skipped = f"no run has {', '.join(missing)}" + "".join(f"; {hint}" for hint in hints if hint)
    if len(missing) == len(wanted):
        others = ", ".join(sorted(found - {"step", "time"})) or "none, because no step is done yet"
        raise ConfigError(f"there is nothing to draw: {skipped}" + ("" if any(hints) else f"; they have {others}"))
    if missing and args.metrics:
        print(f"skipped: {skipped}")
    panels = [Panel(name, args.by == "time") for name in wanted if name in found]
    if args.by is None and Panel(REWARD) in panels and any(run.steps for run in runs):
        panels.insert(panels.index(Panel(REWARD)) + 1, Panel(REWARD, by_time=True))
    return panels


def draw(
    path: Path, runs: Sequence[RunHistory], panels: Sequence[Panel], *, smooth: int = SMOOTHED_STEPS, title: str = "",
    num_columns: int = 0,
) -> None:  # fmt: skip
    """Draw the panels, each with a line for each run, and write the picture."""
    from matplotlib.figure import Figure

    columns = num_columns or min(len(panels), MAX_COLUMNS)
    rows = -(-len(panels) // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(max(width * columns, 8), height * rows + 0.5), layout="constrained")
    axes: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis, panel in zip(axes, panels, strict=False):
        _draw_panel(axis, runs, panel, smooth)
    figure.legend(
        handles=_legend(runs, panels, smooth), title=title or (runs[0].name if len(runs) == 1 else ""),
        title_fontsize="large", loc="outside upper center", ncols=max(3, columns), frameon=False,
    )  # fmt: skip
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}; give another --output") from error


def _legend(runs: Sequence[RunHistory], panels: Sequence[Panel], smooth: int) -> list[Line2D]:
    from matplotlib.lines import Line2D

    mean = f"mean of {smooth} steps"
    names = [run.name for run in runs] if len(runs) > 1 else [mean]
    lines = [Line2D([], [], **_style(number), label=name) for number, name in enumerate(names)]
    if smooth > 1:
        label = f"one step (line: {mean})" if len(runs) > 1 else "one step"
        lines.append(Line2D([], [], color="gray", alpha=FAINT, label=label))
    if any(panel.metric == REWARD for panel in panels) and any(run.scores for run in runs):
        lines.append(Line2D([], [], color="black", marker="o", linestyle="", markersize=5, label="held-out score"))
    return lines


def _style(number: int) -> dict[str, Any]:
    """How the lines of a run look: matplotlib has ten colors."""
    return {"color": f"C{number}", "linestyle": "-" if number < 10 else "--"}


def _draw_panel(axis: Axes, runs: Sequence[RunHistory], panel: Panel, smooth: int) -> None:
    unit, unit_s = "step", 1.0
    if panel.by_time:
        longest_s = max((end for run in runs for end in run.seconds.values() if math.isfinite(end)), default=0.0)
        unit, unit_s = ("hours", 3600.0) if longest_s > 7200 else ("minutes", 60.0)
    drawn, window = [0.0], 1 if panel.metric in EXACT else smooth
    faint = FAINT_METRICS.get(panel.metric, panel.metric if window > 1 else "")
    for number, run in enumerate(runs):
        style = _style(number)
        if faint:
            places, values = run.points(faint, panel.by_time)
            axis.plot([place / unit_s for place in places], values, **style, alpha=FAINT, linewidth=1)
            drawn += values
        places, values = run.points(panel.metric, panel.by_time)
        # A line through one point cannot be seen.
        marker = "o" if len(places) == 1 else ""
        axis.plot([place / unit_s for place in places], smoothed(values, window), **style, marker=marker)
        drawn += values
        if panel.metric == REWARD:
            places, scores = run.score_points(panel.by_time)
            marks = {"color": style["color"], "edgecolors": "black"} if len(runs) > 1 else {"color": "black"}
            axis.scatter([place / unit_s for place in places], scores, s=22, zorder=3, **marks)
            drawn += scores
    axis.set(title=LABELS.get(panel.metric, panel.metric), xlabel=unit)
    if min(drawn) == 0:
        axis.set_ylim(0, 1.05 * max(drawn) or 1)
    axis.grid(alpha=0.25)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` values at most."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]
