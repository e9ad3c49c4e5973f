"""`penstock simulate`: idle time and staleness to expect of a fleet, by simulation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.sizing.fleet_model import Forecast

_OPTIONS: dict[str, tuple[type, str]] = {
    "num_servers": (int, "rollout servers"),
    "concurrent_groups": (int, "prompts that a server works on at once"),
    "group_s": (float, "seconds of one group, lease to hand-in, on average"),
    "group_variation": (float, "standard deviation of that over the mean"),
    "longest_group": (float, "longest group over the mean"),
    "groups_per_step": (int, "groups of one step"),
    "max_staleness": (int, "versions by which a group may be old"),
    "train_s": (float, "seconds of forward passes and update"),
    "gather_s": (float, "seconds that training waits for a version to be staged"),
    "push_s": (float, "seconds from an update until servers serve it"),
    "pause_s": (float, "seconds for which decoding stands still then"),
    "server_mtbf_s": (float, "mean seconds between failures of one server"),
    "restart_s": (float, "seconds until a failed server is back"),
    "lease_ttl_s": (float, "seconds until its prompts are leased again"),
    "num_steps": (int, "steps to simulate"),
    "seed": (int, "of the durations"),
}
_REQUIRED = ("num_servers", "concurrent_groups", "group_s", "groups_per_step", "max_staleness", "train_s")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="penstock simulate",
        description="Predict a run's idle time and staleness. What a run has measured can be taken from its files.",
    )
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    parser.add_argument("--stale-policy", choices=("wait", "drop", "correct"), help="of the replay queue")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR",
        help="folder of a run: its config.yaml and metrics.jsonl give what is not given here, and what to compare with",
    )  # fmt: skip
    parser.add_argument(
        "--rollout-metrics", type=Path, metavar="FILE", help="/metrics of one of its servers, saved: gives group_s"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from penstock.errors import ConfigError
    from penstock.sizing.fleet_model import FleetModel
    from penstock.sizing.measured_run import episode_seconds, measured_model, measured_outcome
    from penstock.sizing.simulation import simulate

    fields: dict[str, Any] = measured_model(args.run_dir) if args.run_dir else {}
    if args.rollout_metrics:
        fields["group_s"] = episode_seconds(args.rollout_metrics)
    names = (*_OPTIONS, "stale_policy")
    fields |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    missing = [f"--{name.replace('_', '-')}" for name in _REQUIRED if name not in fields]
    if missing:
        raise ConfigError(f"give {', '.join(missing)}; or --run-dir, and --rollout-metrics for the seconds of a group")
    forecast = simulate(FleetModel(**fields))
    measured = measured_outcome(args.run_dir) if args.run_dir else {}
    if args.json:
        print(json.dumps({"model": fields, "forecast": _plain(forecast), "measured": measured}, indent=2))
    else:
        _print(forecast, measured)
    return 0


def _plain(forecast: Forecast) -> dict[str, Any]:
    return {name: value for name, value in vars(forecast).items() if name != "steps"}


def _print(forecast: Forecast, measured: dict[str, float]) -> None:
    print(f"{'':<22}{'predicted':>12}{'measured' if measured else '':>12}")
    for name, value in _plain(forecast).items():
        beside = f"{measured[name]:>12.3f}" if name in measured else ""
        print(f"{name:<22}{value:>12.3f}{beside}")
