"""`penstock simulate`: predict the idle time and staleness of a run by simulation."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import Parser
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock_tools.sizing.simulation import Forecast

_OPTIONS: dict[str, tuple[type, str]] = {
    "num_servers": (int, "number of rollout servers"),
    "concurrent_groups": (int, "prompts that one server works on at once"),
    "group_s": (float, "mean seconds from the lease of a prompt to its finished group"),
    "group_variation": (float, "standard deviation of group_s, divided by its mean"),
    "longest_group": (float, "longest group, as a multiple of the mean"),
    "groups_per_step": (int, "groups per step"),
    "max_staleness": (int, "largest number of versions that a group may be old"),
    "train_s": (float, "seconds of forward passes and update in one step"),
    "gather_s": (float, "seconds that training waits while a version is staged"),
    "push_s": (float, "seconds from an update until the servers serve it"),
    "pause_s": (float, "seconds that decoding pauses while a version is loaded"),
    "server_mtbf_s": (float, "mean seconds between two failures of one server"),
    "restart_s": (float, "seconds until a failed server works again"),
    "lease_ttl_s": (float, "seconds until a failed server's prompts are leased again"),
    "num_steps": (int, "steps to simulate"),
    "seed": (int, "seed of the random durations"),
}
_REQUIRED = ("num_servers", "concurrent_groups", "group_s", "groups_per_step", "max_staleness", "train_s")


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock simulate",
        description="Predict a run's idle time and staleness. --run-dir takes the inputs from a run.",
    )
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument("--stale-policy", choices=("wait", "drop", "correct"), help="replay.stale_policy of the run")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR",
        help="folder of a run: take inputs from its config.yaml and metrics.jsonl, and compare the result with them",
    )  # fmt: skip
    parser.add_argument(
        "--rollout-metrics", type=Path, metavar="FILE", help="saved /metrics of a rollout server, to read group_s from"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from penstock_tools.sizing.simulation import FleetModel, simulate

    fields: dict[str, Any] = measured_model(args.run_dir) if args.run_dir else {}
    if args.rollout_metrics:
        fields["group_s"] = episode_seconds(args.rollout_metrics)
    names = (*_OPTIONS, "stale_policy")
    fields |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    missing = [f"--{name.replace('_', '-')}" for name in _REQUIRED if name not in fields]
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}; or give --run-dir, and --rollout-metrics for group_s")
    forecast = simulate(FleetModel(**fields))
    measured = measured_outcome(args.run_dir) if args.run_dir else {}
    if args.json:
        print(json.dumps({"model": fields, "forecast": forecast.numbers(), "measured": measured}, indent=2))
    else:
        _print(forecast, measured)
    return 0


def _print(forecast: Forecast, measured: dict[str, float]) -> None:
    print(f"{'':<22}{'predicted':>12}{'measured' if measured else '':>12}")
    for name, value in forecast.numbers().items():
        compared = f"{measured[name]:>12.3f}" if name in measured else ""
        print(f"{name:<22}{value:>12.3f}{compared}")


# ── what a finished run measured ──

WARM_UP_STEPS = 5
"""Number of first steps that are ignored: they load kernels and fill the queue."""
_EPISODE = re.compile(r"^penstock_rollout_episode_duration_seconds_(sum|count) (\S+)$", re.M)


def measured_model(folder: Path) -> dict[str, Any]:
    """Fields of a FleetModel: limits from the run's configuration, and durations that the learner measured."""
    from penstock.config.loading import load_config

    config = load_config(folder / "config.yaml")
    rows = _rows(folder)
    return {
        "num_servers": config.rollout.num_servers,
        "concurrent_groups": config.rollout.max_concurrent_groups,
        "groups_per_step": config.replay.groups_per_step,
        "max_staleness": config.replay.max_staleness,
        "stale_policy": config.replay.stale_policy,
        "lease_ttl_s": config.replay.lease_ttl_s,
        "train_s": _mean(rows, "forward_s") + _mean(rows, "update_s"),
        "gather_s": _mean(rows, "gather_s"),
        "push_s": _mean(rows, "gather_s"),
        "num_steps": max(100, len(rows)),
    }


def measured_outcome(folder: Path) -> dict[str, float]:
    """Measured values, with the names of a Forecast."""
    rows = _rows(folder)
    return {
        "idle_share": sum(row["wait_s"] for row in rows) / sum(row["step_s"] for row in rows),
        "step_s": _mean(rows, "step_s"),
        "staleness_mean": _mean(rows, "staleness_mean"),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "mixed_version_ratio": _mean(rows, "mixed_version_ratio"),
    }


def episode_seconds(metrics_file: Path) -> float:
    """Mean seconds per group, from the saved /metrics of a rollout server."""
    found = {name: float(value) for name, value in _EPISODE.findall(metrics_file.read_text())}
    if not found.get("count"):
        raise ConfigError(
            f"{metrics_file} has no finished groups; save /metrics of a rollout server that has finished some"
        )
    return found["sum"] / found["count"]


def _rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the folder of a run that has trained") from error
    if len(rows) <= WARM_UP_STEPS:
        raise ConfigError(f"{path} has {len(rows)} steps; more than {WARM_UP_STEPS} are needed")
    return rows[WARM_UP_STEPS:]


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)
