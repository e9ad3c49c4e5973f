"""Random weights that a publisher stages, for tests of pushes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.weights.checksums import XXH3_PIECES, host_checksum, weights_digest
from penstock.weights.deadline import Deadline
from penstock_learner.weights.publisher import WeightPublisher


def stage_weights(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    publisher: WeightPublisher,
    version: int,
    keep: tuple[int, ...] = (),
    changed: float = 1.0,
) -> str:
    """Stage random weights. A part of them differs from version to version. Returns the digest of the bytes."""
    base, own = np.random.default_rng(0), np.random.default_rng(version)
    staged = publisher.begin(version, 1, shapes, keep=keep)
    for name, shape in shapes:
        weight = base.standard_normal(shape, dtype=np.float32)
        mask = own.random(shape) < changed
        weight[mask] = own.standard_normal(shape, dtype=np.float32)[mask]
        staged.put(name, torch.from_numpy(weight))
    staged.checksums(Deadline(10, "hashing"))
    return weights_digest([host_checksum(XXH3_PIECES, bucket.numpy()) for bucket in staged.memory.buckets])
