"""`penstock simulate`: predict the step time, idle time and staleness of a run from its durations, and compare the
prediction with what the run measured."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.parser import Parser, whole_number
from penstock.errors import ConfigError
from penstock.step_history import METRICS, read_steps

_REQUIRED = {
    "num_servers": "number of rollout servers",
    "concurrent_groups": "prompts that one server works on at once",
    "group_s": "mean seconds from the lease of a prompt to its finished group, on a full server",
    "groups_per_step": "groups per step",
    "max_staleness": "largest number of versions that a group may be old",
    "train_s": "seconds of forward passes and update in one step",
}
_OPTIONAL = {
    "gather_s": "seconds of push_s in which training waits while a version is staged",
    "push_s": "seconds from an update until the servers serve it",
    "pause_s": "seconds that decoding pauses while a version is loaded",
    "server_mtbf_s": "mean seconds between two failures of one server",
}
RESTART_S = 300.0
"""Seconds until a failed server works again."""
WARM_UP_STEPS = 5
"""Number of first steps that are ignored: they load kernels and fill the queue."""
_EPISODE = re.compile(r"^penstock_rollout_episode_duration_seconds_(sum|count) (\S+)$", re.M)


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock simulate",
        description="Predict a run's step time, idle time and staleness. --run-dir takes the inputs from a run.",
    )
    for name, text in (_REQUIRED | _OPTIONAL).items():
        kind: Any = float if name.endswith("_s") else whole_number(0 if name == "max_staleness" else 1)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=text)
    folder = "folder of a run: take inputs from its config.yaml and metrics.jsonl, and compare the result with them"
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help=folder)
    parser.add_argument(
        "--rollout-metrics", type=Path, metavar="FILE", help="saved /metrics of a rollout server, to read group_s from"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    model, measured = _measured(args.run_dir) if args.run_dir else ({}, {})
    if args.rollout_metrics:
        model["group_s"] = episode_seconds(args.rollout_metrics)
    model |= {name: value for name in _REQUIRED | _OPTIONAL if (value := getattr(args, name)) is not None}
    if missing := [f"--{name.replace('_', '-')}" for name in _REQUIRED if name not in model]:
        raise ConfigError(f"missing: {', '.join(missing)}; or give --run-dir, and --rollout-metrics for group_s")
    predicted = forecast(model)
    if args.json:
        print(json.dumps({"model": model, "forecast": predicted, "measured": measured}, indent=2))
        return 0
    print(f"{'':<16}{'predicted':>12}{'measured' if measured else '':>12}")
    for name, value in predicted.items():
        print(f"{name:<16}{value:>12.3f}" + (f"{measured[name]:>12.3f}" if name in measured else ""))
    return 0


def forecast(model: dict[str, Any]) -> dict[str, float]:
    """The steady state of a run. A failure loses half the work on each of a server's groups, and the server is away
    until it has restarted."""
    from penstock_tools.sizing.rates import pace

    slots, group_s = model["num_servers"] * model["concurrent_groups"], model["group_s"]
    if not (group_s > 0 and model["train_s"] > 0):
        raise ConfigError("--group-s and --train-s must be above 0")
    if mtbf_s := model.get("server_mtbf_s"):
        if mtbf_s <= group_s:
            raise ConfigError("--server-mtbf-s must be longer than --group-s, or no group would finish")
        slots *= (mtbf_s - group_s / 2) / (mtbf_s + RESTART_S)
    gather_s, push_s, pause_s = (model.get(name, 0.0) for name in ("gather_s", "push_s", "pause_s"))
    found = pace(
        (model["train_s"], gather_s, push_s, pause_s), group_s, slots, model["max_staleness"], model["groups_per_step"],
        in_order=model.get("stale_policy") == "wait",
    )  # fmt: skip
    return {
        "step_s": found.step_s, "idle_share": found.learner_idle, "busy_share": 1 - found.servers_idle,
        "staleness_mean": found.staleness, "groups_per_s": model["groups_per_step"] / found.step_s,
    }  # fmt: skip


def _measured(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """The inputs of a run: limits from its configuration, and durations that its learner measured. And its results."""
    from penstock.config.loading import load_config

    config, rows = load_config(folder / "config.yaml"), read_steps(folder)
    if len(rows) <= WARM_UP_STEPS:
        raise ConfigError(f"{folder / METRICS} has {len(rows)} steps; more than {WARM_UP_STEPS} are needed")
    names = ("forward_s", "update_s", "gather_s", "wait_s", "step_s", "staleness_mean")
    mean = {name: sum(row[name] for row in rows[WARM_UP_STEPS:]) / len(rows[WARM_UP_STEPS:]) for name in names}
    rollout, replay = config.rollout, config.replay
    model = {
        "num_servers": rollout.num_servers, "concurrent_groups": rollout.max_concurrent_groups,
        "groups_per_step": replay.groups_per_step, "max_staleness": replay.max_staleness,
        "stale_policy": replay.stale_policy, "train_s": mean["forward_s"] + mean["update_s"],
        "gather_s": mean["gather_s"], "push_s": mean["gather_s"],
    }  # fmt: skip
    results = {name: mean[name] for name in ("step_s", "staleness_mean")}
    return model, results | {"idle_share": mean["wait_s"] / mean["step_s"]}


def episode_seconds(metrics_file: Path) -> float:
    """Mean seconds per group, from the saved /metrics of a rollout server."""
    found = {name: float(value) for name, value in _EPISODE.findall(metrics_file.read_text())}
    if not found.get("count"):
        raise ConfigError(
            f"{metrics_file} has no finished groups; save /metrics of a rollout server that has finished some"
        )
    return found["sum"] / found["count"]
