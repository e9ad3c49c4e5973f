"""snapshot: read the buckets from a safetensors file on a shared volume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.errors import WeightPushFailed
from penstock.weights.snapshot import read_snapshot
from penstock_rollout.weights.reception import Arrived, Reception


def receive(reception: Reception) -> Iterator[Arrived]:
    """Yield buckets in host memory. The rendezvous is the snapshot's folder."""
    folder = Path(reception.rendezvous)
    try:
        for bucket in read_snapshot(folder, reception.manifest):
            reception.deadline.check()
            yield Arrived(torch.from_numpy(bucket))
    except OSError as error:
        raise WeightPushFailed(f"reading the snapshot in {folder} failed: {error.strerror or error}") from error
