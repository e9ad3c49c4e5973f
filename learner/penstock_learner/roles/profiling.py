"""Profiles of chosen steps: traces that torch's profiler records in the ranks, and Ray's timeline.

    profiles/step-12-policy-0.json.gz    a Chrome trace: open it in chrome://tracing or ui.perfetto.dev
    profiles/ray-timeline.json

A profile that cannot be written is reported in the log; training continues.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from penstock.config.run import RunConfig

logger = logging.getLogger(__name__)


def profiles_folder(config: RunConfig) -> Path:
    return config.folder / "profiles"


class RankProfiler:
    """Records one rank. The recording covers the thread in which `start` is called."""

    def __init__(self, role: str, rank: int) -> None:
        self.role = role
        self.rank = rank
        self.running: profile | None = None

    def start(self, device: torch.device) -> None:
        """Begin to record. A recording that an earlier step did not finish is dropped."""
        self._end()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        try:
            self.running = profile(activities=activities)
            self.running.start()
        except RuntimeError as error:
            self.running = None
            logger.error("profile was not started: %s", error)

    def write(self, folder: Path, step: int) -> None:
        """End the recording and write the trace. Does nothing if the rank was restarted since `start`."""
        ended = self._end()
        if ended is None:
            return
        path = folder / f"step-{step}-{self.role}-{self.rank}.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ended.export_chrome_trace(str(path))
            logger.info("wrote %s", path)
        except (OSError, RuntimeError) as error:
            logger.error("profile %s was not written: %s", path, error)

    def _end(self) -> profile | None:
        ended, self.running = self.running, None
        if ended is not None:
            ended.stop()
        return ended


def write_ray_timeline(path: Path) -> None:
    """Write Ray's timeline, which has all calls that the cluster has made so far."""
    import ray

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ray.timeline(str(path))
        logger.info("wrote %s", path)
    except Exception as error:  # Ray raises many types, and a timeline is not worth failing a run
        logger.error("Ray's timeline %s was not written: %r", path, error)
