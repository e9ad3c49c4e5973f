"""The receiver in a scheduler process of SGLang, called over its socket."""

from __future__ import annotations

import asyncio
import os
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.snapshot import write_snapshot
from penstock.weights.transports import XXH3_PIECES, TensorShape, build_manifest, host_checksum
from penstock_rollout.engines.sglang.plugin import StageCalls, StageWorker, announce_plugin, serve_stage, socket_path
from support.weight_buckets import allocate_buckets


def announced(version: int, folder: Path) -> tuple[weights_pb2.AnnounceRequest, list[str]]:
    """Write a snapshot of one tensor, full of its version. Returns its announcement and its checksums."""
    manifest = build_manifest("run", version, 1, [TensorShape("w", "F32", (8,))], bucket_bytes=1024)
    buckets = allocate_buckets(manifest)
    buckets[0][:32] = np.full(8, version, np.float32).view(np.uint8)
    checksums = [host_checksum(XXH3_PIECES, bucket) for bucket in buckets]
    write_snapshot(folder, manifest, buckets, checksums)
    announcement = weights_pb2.AnnounceRequest(
        manifest=manifest, transport="snapshot", rendezvous=str(folder), rank=0, world_size=1, deadline_s=60.0
    )
    return announcement, checksums


@pytest.fixture
def worker(tmp_path: Path) -> StageWorker:
    worker = StageWorker(tmp_path, 0, torch.device("cpu"))
    serve_stage(socket_path(tmp_path, 0), worker)
    return worker


def test_neither_an_abort_nor_the_next_stage_takes_a_verified_version_away(tmp_path: Path, worker: StageWorker) -> None:
    """Both may arrive between the verification and the load."""
    calls = StageCalls(tmp_path, num_workers=1)
    first, checksums = announced(3, tmp_path / "3")
    second, _ = announced(4, tmp_path / "4")

    async def verify_then_disturb() -> None:
        assert await calls.devices() == ("cpu",)
        await calls.stage(first)
        assert await calls.verify(3, checksums, timeout_s=60) > 0
        await calls.abort()
        await calls.stage(second)

    asyncio.run(verify_then_disturb())
    ((name, tensor),) = worker.tensors(3)
    assert (name, tensor.tolist()) == ("w", [3.0] * 8)
    with pytest.raises(AssertionError, match="only what was verified"):
        list(worker.tensors(4))


def test_a_version_that_differs_or_is_not_staged_is_refused(tmp_path: Path, worker: StageWorker) -> None:
    calls = StageCalls(tmp_path, num_workers=1)
    announcement, checksums = announced(3, tmp_path / "3")

    async def push(version: int, expected: list[str]) -> None:
        await calls.stage(announcement)
        await calls.verify(version, expected, timeout_s=60)

    with pytest.raises(WeightPushFailed, match="version 4 is not staged; 3 is"):
        asyncio.run(push(4, checksums))
    with pytest.raises(WeightPushFailed, match="bucket 0 is corrupt"):
        asyncio.run(push(3, ["0" * 32]))
    with pytest.raises(AssertionError):
        list(worker.tensors(3))


def test_a_scheduler_that_is_gone_fails_the_push(tmp_path: Path) -> None:
    calls = StageCalls(tmp_path, num_workers=1)
    assert not calls.are_served
    with pytest.raises(WeightPushFailed, match="did not answer abort"):
        asyncio.run(calls.abort())


def test_only_processes_with_the_folder_on_their_path_find_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("SGLANG_PLUGINS", "theirs")
    environment = announce_plugin(tmp_path)
    assert environment["PYTHONPATH"] == f"{tmp_path}{os.pathsep}/elsewhere"
    assert environment["SGLANG_PLUGINS"] == "penstock,theirs"
    (found,) = distributions(path=[str(tmp_path)])
    ((group, name),) = {(point.group, point.name) for point in found.entry_points}
    assert (group, name) == ("sglang.srt.plugins", "penstock")
