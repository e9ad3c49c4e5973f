"""Staging a version in host memory: the copies, and the checksums that other threads compute meanwhile."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.loading import validate
from penstock.weights import transports as manifests
from penstock.weights.transports import Deadline, TensorShape, build_manifest, host_checksum
from penstock_learner.weights import staging
from penstock_learner.weights.publisher import WeightPublisher
from penstock_learner.weights.staging import HostBuckets, StagedVersion, checksum_name

SHAPES = [TensorShape(f"t{index}", "BF16", (1000 + 17 * index, 3)) for index in range(9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as it is", "with a cast"])
@pytest.mark.parametrize("piece_bytes", [512, 8192, 2**22], ids=["many pieces", "a few", "one"])
def test_the_checksums_are_those_of_the_staged_bytes(
    dtype: torch.dtype, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (manifests, staging):
        monkeypatch.setattr(module, "CHECKSUM_PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(staging, "COPY_BYTES", 640)
    manifest = build_manifest("run", 1, 1, SHAPES, bucket_bytes=20_000)
    memory = HostBuckets([bucket.num_bytes for bucket in manifest.buckets])
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


def test_memory_is_not_used_again_while_an_earlier_version_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validate({"model": {"path": str(tmp_path)}, "weights": {"transport": "shm"}}, "test")
    publisher = WeightPublisher(config, "127.0.0.1")
    hashed = threading.Event()
    real = StagedVersion._check_and_hash

    def check_slowly(self: StagedVersion, *arguments: Any) -> str:
        if self.policy_version == 1:
            hashed.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(StagedVersion, "_check_and_hash", check_slowly)
    versions = []
    for version in (1, 2):
        versions.append(publisher.begin(version, 1, [("w", (100,))]))
        versions[-1].put("w", torch.full((100,), float(version)))
    first, second = versions
    second.wait_sealed(Deadline(30, "hashing"))
    assert first.memory is not second.memory and not first.is_idle
    hashed.set()
    third = publisher.begin(3, 1, [("w", (100,))], keep=[2])
    assert first.is_idle and third.memory is first.memory, "the next version waits for it, and takes its memory"
    assert torch.equal(second.memory.buckets[0], torch.full((100,), 2.0).view(torch.uint8))
