"""Configuration of the weight push."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from penstock.config.base import Config


class WeightsConfig(Config):
    """How new weights get from the learner to the rollout servers."""

    transport: Literal["auto", "nccl", "cuda_ipc", "shm", "gloo", "snapshot"] = "auto"
    """How weights are sent. `auto` takes the fastest transport that every rollout server in a push supports, and logs
    it."""
    catch_up: Literal["publisher", "snapshot"] = "publisher"
    """How a late or recovered server gets the current version: `publisher` by its own push, `snapshot` from disk."""
    delta: bool | Literal["auto"] = "auto"
    """Send only the bytes that changed, to servers that have the version before. `auto`: by `nccl` and `gloo`, if such
    pushes were faster in this run than pushes of all bytes. True: always, where the transport can. False: never."""
    gloo_group_size: int = Field(default=32, ge=2)
    """How many workers a gloo group has at most, because all ranks of a group connect to each other. With more workers,
    the learner sends to one relay for each group, which hands the weights on to the others."""
    staging: Literal["auto", "host", "device"] = "auto"
    """Where the learner keeps a version until it is pushed. `auto`: on its GPU if it has one, otherwise in host
    memory."""
    bucket_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Approximate size, in bytes, of the buckets that tensors are packed into."""
    ready_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a rollout server has to answer the announcement, or the abort, of a push before it is evicted from
    the push. A server that cannot be reached is evicted after 5 s at most, and then catches up alone."""
    push_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of a push, in seconds, from the first bucket to the last commit."""
    snapshot_every_steps: int = Field(default=50, ge=1)
    """Number of steps between snapshots. A snapshot is a version in safetensors files; late servers and roll backs load
    it."""
    keep_snapshots: int = Field(default=2, ge=1)
    """Number of snapshots to keep. Older ones are deleted."""
    cluster_key_file: Path | None = None
    """File with the key that protects the servers' internal port. Every process of the run needs the same key. None:
    `cluster.key` in the run's folder, which is made when it is missing. A rollout server that listens on anything but
    loopback needs a file that is named here."""
