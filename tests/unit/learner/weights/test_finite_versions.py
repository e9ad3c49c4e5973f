"""A version with a number that is not finite is never sealed, and the tensor is named."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import TrainingDiverged
from penstock.weights.transports import Deadline, TensorShape, build_manifest
from penstock_learner.weights.staging import HostBuckets, StagedVersion, first_nonfinite

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
BUCKET_BYTES = 64


def stage(weights: dict[str, torch.Tensor], dtype: torch.dtype) -> StagedVersion:
    """A version with several small buckets."""
    shapes = [TensorShape(name, NAMES[dtype], tuple(weight.shape)) for name, weight in weights.items()]
    manifest = build_manifest("run", 7, 1, shapes, BUCKET_BYTES)
    staged = StagedVersion(manifest, HostBuckets([bucket.num_bytes for bucket in manifest.buckets]))
    for name, weight in weights.items():
        staged.put(name, weight)
    return staged


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_number_anywhere_is_enough(dtype: torch.dtype, value: float) -> None:
    for guilty in "abc":
        weights = {name: torch.randn(3, 5) for name in "abc"}
        weights[guilty][2, 4] = value
        staged = stage(weights, dtype)
        with pytest.raises(TrainingDiverged, match=f"version 7 is not finite: {guilty}"):
            staged.checksums(Deadline(10, "hashing"))
        assert staged.nonfinite == guilty and not staged.is_sealed


def test_a_weight_that_only_the_type_of_the_engine_cannot_hold_is_refused() -> None:
    weights = {"a": torch.ones(4), "b": torch.full((4,), 70000.0)}
    assert stage(weights, torch.bfloat16).checksums(Deadline(10, "hashing"))
    with pytest.raises(TrainingDiverged, match="version 7 is not finite: b"):
        stage(weights, torch.float16).checksums(Deadline(10, "hashing"))


def test_finite_weights_of_any_size_pass() -> None:
    largest = torch.full((64,), torch.finfo(torch.float32).max)
    assert (
        first_nonfinite([("a", largest), ("b", -largest), ("none", torch.zeros(0)), ("n", torch.ones(2).int())]) == ""
    )
    assert stage({"a": largest}, torch.float32).checksums(Deadline(10, "hashing"))
