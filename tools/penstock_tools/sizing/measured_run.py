"""Measurements of a finished run, as input of the simulation and to compare its forecast with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from penstock.config.loading import load_config
from penstock.errors import ConfigError

WARM_UP_STEPS = 5
"""Number of first steps that are ignored: they load kernels and fill the queue."""
_EPISODE = re.compile(r"^penstock_rollout_episode_duration_seconds_(sum|count) (\S+)$", re.M)


def measured_model(folder: Path) -> dict[str, Any]:
    """Fields of a FleetModel: limits from the run's configuration, and durations that the learner measured."""
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
