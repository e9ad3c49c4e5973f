"""Configuration of the weight push."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config.base import Config


class WeightsConfig(Config):
    transport: Literal["auto", "nccl", "cuda_ipc", "shm", "gloo", "snapshot"] = "auto"
    """How weights reach the rollout servers; `auto` takes the fastest that all of a push's members can, and logs it."""
    catch_up: Literal["publisher", "snapshot"] = "publisher"
    """How a late or recovered server gets the current version: by a push of its own, or from a snapshot."""
    delta: bool = False
    """Send only what changed, where that is smaller; learner and servers then keep one more set of weights each."""
    staging: Literal["auto", "host", "device"] = "auto"
    """Where the learner holds a version until it is pushed; `auto`: on its GPU if it has one, else in host memory."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Tensors are packed into buckets of about this size."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """A member that has not answered an announcement, or an abort, by then is evicted."""
    push_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline from the first bucket to the last commit."""
    snapshot_every_steps: int = Field(default=50, ge=1)
    """How often a version is also kept as safetensors, from which late joiners load."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Older snapshots are removed."""
    cluster_key_file: Path | None = None
    """File with the key of the internal port; needed as soon as a rollout server listens beyond loopback."""
