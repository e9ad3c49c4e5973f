"""Sender and receiver of cuda_ipc over a stand-in for the CUDA runtime: content, stale memory, wrong GPUs, aborts."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.v1 import weights_pb2
from penstock.weights import cuda
from penstock.weights.cuda import IpcOffer
from penstock.weights.transports import XXH3_PIECES, Deadline, TensorShape, build_manifest
from penstock_learner.weights import senders as sending
from penstock_learner.weights import staging as bucket_memory
from penstock_learner.weights.senders import CudaIpcSender, Shipment
from penstock_learner.weights.staging import MemoryKind, MemoryPool, StagedVersion
from penstock_rollout.weights.receivers import cuda_ipc as receiving
from penstock_rollout.weights.stage import WeightStage
from support.cuda_stand_ins import RuntimeStandIn

DEADLINE_S = 60.0
CPU = torch.device("cpu")
SHAPES = {f"t{index}": (97 + index,) for index in range(70)}


def host_bytes(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(pointer)))


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[RuntimeStandIn]:
    stand_in = RuntimeStandIn()
    receiving._copy_stream.cache_clear()
    monkeypatch.setattr(cuda, "runtime", lambda: stand_in)
    monkeypatch.setattr(bucket_memory, "bytes_at", host_bytes)
    monkeypatch.setattr(sending, "device_uuid", lambda device: "GPU-1")
    monkeypatch.setattr(receiving, "device_uuid", lambda device: "GPU-1")
    yield stand_in
    receiving.mappings.close()
    assert stand_in.num_mapped == 0, "every mapping is closed"


def begin(version: int, kind: MemoryKind, pool: MemoryPool | None = None) -> StagedVersion:
    manifest = build_manifest("run", version, 1, [TensorShape(n, "F32", s) for n, s in SHAPES.items()], 1024)
    manifest.checksum = XXH3_PIECES
    memory = (pool or MemoryPool(CPU)).take(kind, [bucket.num_bytes for bucket in manifest.buckets])
    return StagedVersion(manifest, memory)


def fill(staged: StagedVersion, names: list[str]) -> None:
    generator = torch.Generator().manual_seed(staged.policy_version)
    for name in names:
        staged.put(name, torch.rand(SHAPES[name], generator=generator))


def start_stage(manifest: weights_pb2.WeightManifest, rendezvous: str, timeout_s: float = DEADLINE_S) -> WeightStage:
    announcement = weights_pb2.AnnounceRequest(
        manifest=manifest, transport="cuda_ipc", rendezvous=rendezvous, rank=1, world_size=2, deadline_s=timeout_s
    )
    stage = WeightStage(announcement, Path("unused"))
    stage.start()
    return stage


def deadline() -> Deadline:
    return Deadline(DEADLINE_S, "sending")


def assert_received(stage: WeightStage, staged: StagedVersion) -> None:
    stage.done.result(DEADLINE_S)
    assert stage.phase == "received", stage.failure
    assert stage.mismatch(staged.checksums(deadline())) == ""


@pytest.mark.parametrize("kind", ["device", "host"])
def test_members_get_the_bytes(kind: MemoryKind) -> None:
    staged = begin(1, kind)
    fill(staged, list(SHAPES))
    shipment, sender = Shipment(staged.manifest, staged), CudaIpcSender(CPU)
    rendezvous = sender.open(shipment, [], deadline())
    stages = [start_stage(staged.manifest, rendezvous) for _ in range(2)]
    sender.send(shipment, [], deadline())
    for stage in stages:
        assert_received(stage, staged)
    sender.close(failed=False)


def test_buckets_are_copied_as_they_become_ready() -> None:
    staged = begin(1, "device")
    shipment, sender = Shipment(staged.manifest, staged), CudaIpcSender(CPU)
    stage = start_stage(staged.manifest, sender.open(shipment, [], deadline()))
    half = len(SHAPES) // 2
    fill(staged, list(SHAPES)[:half])
    thread_deadline = deadline()
    thread = threading.Thread(target=sender.send, args=(shipment, [], thread_deadline))
    thread.start()
    deadline().wait_until(lambda: len(stage.buckets) >= half // 3)
    assert stage.phase == "receiving"
    fill(staged, list(SHAPES)[half:])
    thread.join(DEADLINE_S)
    assert_received(stage, staged)


def test_nothing_is_read_before_the_publisher_says_so() -> None:
    staged = begin(1, "host")
    fill(staged, list(SHAPES))
    sender = CudaIpcSender(CPU)
    rendezvous = sender.open(Shipment(staged.manifest, staged), [], deadline())
    for num_claimed in (0, len(staged.manifest.buckets)):
        claim = replace(IpcOffer.from_json(rendezvous), num_ready=num_claimed)
        stage = start_stage(staged.manifest, claim.to_json(), timeout_s=0.3)
        stage.done.result(DEADLINE_S)
        assert "longer than" in stage.failure
        assert stage.buckets == []


def test_what_is_claimed_too_early_is_copied_again_once_it_is_ready() -> None:
    staged = begin(1, "host")
    fill(staged, list(SHAPES))
    shipment, sender = Shipment(staged.manifest, staged), CudaIpcSender(CPU)
    offer = IpcOffer.from_json(sender.open(shipment, [], deadline()))
    stage = start_stage(staged.manifest, replace(offer, num_ready=len(staged.manifest.buckets)).to_json())
    time.sleep(0.05)
    assert stage.buckets == []
    sender.send(shipment, [], deadline())
    assert_received(stage, staged)


def test_a_version_that_is_staged_whole_is_ready_when_it_is_offered() -> None:
    staged = begin(1, "device")
    fill(staged, list(SHAPES))
    staged.checksums(deadline())
    rendezvous = CudaIpcSender(CPU).open(Shipment(staged.manifest, staged), [], deadline())
    assert_received(start_stage(staged.manifest, rendezvous), staged)


def test_memory_that_now_holds_another_version_is_not_taken_for_it() -> None:
    pool = MemoryPool(CPU)
    old = begin(1, "device", pool)
    fill(old, list(SHAPES))
    old_manifest, sender = old.manifest, CudaIpcSender(CPU)
    rendezvous = sender.open(Shipment(old.manifest, old), [], deadline())
    old.checksums(deadline())
    sender.close(failed=True)
    pointer = old.memory.allocation.pointer  # type: ignore[attr-defined]
    pool.give_back(old.memory)
    new = begin(2, "device", pool)
    assert new.memory.allocation.pointer == pointer, "the next version uses the same memory"  # type: ignore[attr-defined]
    fill(new, list(SHAPES))
    sender.open(Shipment(new.manifest, new), [], deadline())
    sender.send(Shipment(new.manifest, new), [], deadline())
    stage = start_stage(old_manifest, rendezvous, timeout_s=0.3)
    stage.done.result(DEADLINE_S)
    assert stage.phase == "failed"
    assert stage.buckets == []


def test_a_worker_on_another_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = begin(1, "device")
    fill(staged, list(SHAPES))
    rendezvous = CudaIpcSender(CPU).open(Shipment(staged.manifest, staged), [], deadline())
    monkeypatch.setattr(receiving, "device_uuid", lambda device: "GPU-2")
    stage = start_stage(staged.manifest, rendezvous)
    stage.done.result(DEADLINE_S)
    assert "publisher is on GPU GPU-1, this worker on GPU-2" in stage.failure


def test_a_dead_publisher_s_memory_cannot_be_mapped(runtime: RuntimeStandIn) -> None:
    staged = begin(1, "device")
    rendezvous = CudaIpcSender(CPU).open(Shipment(staged.manifest, staged), [], deadline())
    runtime.allocations.clear()
    stage = start_stage(staged.manifest, rendezvous)
    stage.done.result(DEADLINE_S)
    assert "cannot be mapped" in stage.failure
    staged.memory.allocation.pointer = 0  # type: ignore[attr-defined]


def test_an_abort_ends_the_wait_for_buckets() -> None:
    staged = begin(1, "device")
    stage = start_stage(staged.manifest, CudaIpcSender(CPU).open(Shipment(staged.manifest, staged), [], deadline()))
    stage.abort()
    stage.done.result(DEADLINE_S)
    assert "aborted" in stage.failure


def test_memory_of_versions_that_are_gone_is_used_again_and_zeroed(runtime: RuntimeStandIn) -> None:
    pool = MemoryPool(CPU)
    for version in range(1, 6):
        staged = begin(version, "device", pool)
        assert all(not bucket.any() for bucket in staged.memory.buckets)
        fill(staged, list(SHAPES))
        staged.checksums(deadline())
        staged.memory.is_reusable = version % 2 == 0  # GPU memory is reused either way
        pool.give_back(staged.memory)
    assert len(runtime.allocations) == 1


def push(version: int, term: int = 1, staged: StagedVersion | None = None) -> StagedVersion:
    """Make a complete push, in the memory of an earlier version if one is given."""
    new = begin(version, "device")
    new.manifest.term = term
    if staged is not None:
        new.memory = staged.memory
        new.memory.clear()
    fill(new, list(SHAPES))
    sender, shipment = CudaIpcSender(CPU), Shipment(new.manifest, new)
    stage = start_stage(new.manifest, sender.open(shipment, [], deadline()))
    sender.send(shipment, [], deadline())
    assert_received(stage, new)
    return new


def test_memory_that_is_offered_again_is_not_mapped_again(runtime: RuntimeStandIn) -> None:
    first = push(1)
    num_maps = runtime.num_maps
    second = push(2, staged=first)
    push(3, staged=second)
    assert runtime.num_maps == num_maps


def test_a_new_learner_s_push_lets_go_of_what_the_old_one_left(runtime: RuntimeStandIn) -> None:
    old = [push(1), push(2)]
    assert runtime.num_mapped == 2
    push(3, term=2)
    assert runtime.num_mapped == 1
    del old
