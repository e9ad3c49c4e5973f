"""Staging a version in host memory: the copies, and the checksums that other threads compute meanwhile."""

from __future__ import annotations

import pytest
import torch

from penstock.weights import checksums
from penstock.weights.checksums import host_checksum
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import TensorShape, build_manifest
from penstock_learner.weights import staging
from penstock_learner.weights.memory import HostMemory
from penstock_learner.weights.staging import StagedVersion, checksum_name

SHAPES = [TensorShape(f"t{index}", "BF16", (1000 + 17 * index, 3)) for index in range(9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "with a cast"])
@pytest.mark.parametrize("piece_bytes", [512, 8192, 2**22], ids=["many pieces", "a few", "one"])
def test_the_checksums_are_those_of_the_staged_bytes(
    dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checksums, staging):
        monkeypatch.setattr(module, "CHECKSUM_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(staging, "COPY_BYTES", 640)
    manifest = build_manifest("run", 1, 1, SHAPES, bucket_bytes=20_000)
    memory = HostMemory([bucket.num_bytes for bucket in manifest.buckets])
    manifest.checksum = checksum_name(memory)
    staged = StagedVersion(manifest, memory)
    weights = {shape.name: torch.randn(shape.shape, dtype=dtype) for shape in SHAPES}
    for name, weight in weights.items():
        staged.put(name, weight)
    found = staged.checksums(Deadline(30, "hashing"))
    assert found == [host_checksum(manifest.checksum, bucket.numpy()) for bucket in memory.buckets]
    for spec in manifest.tensors:
        raw = memory.buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        assert torch.equal(raw.view(torch.bfloat16), weights[spec.name].to(torch.bfloat16).view(-1))
