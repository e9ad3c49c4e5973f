"""The NCCL group in one process, over NCCL and its stand-in; its sender and its receiver over the stand-in."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights import cuda
from penstock.weights.cuda import NcclGroup
from penstock.weights.transports import Deadline, TensorShape, build_manifest, has_cupy
from penstock_learner.weights import senders as sending
from penstock_learner.weights.senders import NcclSender, PushTarget, Shipment
from penstock_learner.weights.staging import HostBuckets, StagedVersion, checksum_name
from penstock_rollout.weights import stage as receiving
from penstock_rollout.weights.stage import JoinedGroups, WeightStage
from support.cuda_stand_ins import (
    UNIQUE_ID_BYTES,
    NcclBinding,
    NcclCommunicatorStandIn,
    NcclStandIn,
    install_nccl_stand_in,
)

DEADLINE_S = 60.0
SHORT_S = 1.0
PROMPT_S = 25.0
"""Longer than a deadline of SHORT_S plus an abort on a busy machine, and far shorter than DEADLINE_S."""
NUM_TENSORS = 9
NUM_ITEMS = 2**16
CPU = torch.device("cpu")
HOST = "127.0.0.1"
GROUPS = JoinedGroups()
"""The groups of all members of a test, which are in this process."""


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclStandIn]:
    monkeypatch.setattr(cuda, "runtime", cuda.runtime)  # restored after the test
    monkeypatch.setattr(cuda, "nccl", cuda.nccl)
    stand_in = install_nccl_stand_in()
    yield stand_in
    for joined in list(GROUPS.joined):
        GROUPS.drop(joined)
    stand_in.stop()


@pytest.fixture(params=["stand-in", "real"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of a group: on a GPU with NCCL, and in host memory with the stand-in."""
    if request.param == "real":
        if not (torch.cuda.is_available() and has_cupy()):
            pytest.skip("needs a GPU and CuPy")
        return NcclBinding(is_real=True).device
    request.getfixturevalue("nccl")
    return CPU


def group_of(world_size: int, rank: int = 0) -> NcclGroup:
    return NcclGroup(world_size, rank, device_index=0)


def meet() -> bytes:
    return bytes(cuda.nccl().get_unique_id())


def test_a_group_of_one_broadcasts_until_it_is_aborted(device: torch.device) -> None:
    group, deadline = group_of(1), Deadline(DEADLINE_S, "a test")
    group.open(deadline, meet)
    tensor = torch.arange(NUM_ITEMS, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    for _ in range(3):
        group.wait(group.broadcast(tensor.data_ptr(), 8 * NUM_ITEMS, deadline, hold=tensor), deadline)
    assert torch.equal(tensor.cpu(), torch.arange(NUM_ITEMS))
    group.abort()
    assert not group.is_open
    with pytest.raises(WeightPushFailed, match="aborted"):
        group.broadcast(tensor.data_ptr(), 8, deadline)


def test_a_missing_rank_costs_a_deadline_and_the_next_group_works(device: torch.device) -> None:
    group = group_of(2)
    with pytest.raises(WeightPushFailed, match="longer than 1 s"):
        group.open(Deadline(SHORT_S, "meeting"), meet)
    group.abort()
    test_a_group_of_one_broadcasts_until_it_is_aborted(device)


def test_abort_from_another_thread_ends_a_start_that_waits(device: torch.device) -> None:
    group = group_of(2)
    failures: list[BaseException] = []
    began = threading.Event()

    def open_group() -> None:
        began.set()
        try:
            group.open(Deadline(DEADLINE_S, "meeting"), meet)
        except WeightPushFailed as error:
            failures.append(error)

    thread = threading.Thread(target=open_group)
    thread.start()
    assert began.wait(DEADLINE_S)
    while group._thread is None:
        thread.join(0.01)
    group.abort()
    thread.join(PROMPT_S)
    assert not thread.is_alive()
    assert "was aborted" in str(failures[0])
    assert not group.is_open


def test_a_start_that_ends_too_late_is_aborted(nccl: NcclStandIn, caplog: pytest.LogCaptureFixture) -> None:
    unique_id = meet()
    late, group = group_of(2, rank=1), group_of(2)
    with pytest.raises(WeightPushFailed, match="longer than 1 s"):
        group.open(Deadline(SHORT_S, "meeting"), lambda: unique_id)
    group.abort()
    assert "a call of NCCL does not return; it is left behind in its thread" in caplog.text
    assert (nccl.num_communicators, nccl.num_aborts) == (1, 0)
    assert group._thread is not None and group._thread.native_id is not None
    assert os.sched_getscheduler(group._thread.native_id) == os.SCHED_IDLE, "NCCL's thread polls without a pause"
    with pytest.raises(WeightPushFailed):
        late.open(Deadline(SHORT_S, "meeting"), lambda: unique_id)  # the start ends; no one connects
    late.abort()
    group._thread.join(PROMPT_S)
    assert (nccl.num_communicators, nccl.num_aborts) == (0, 2)


@pytest.mark.skipif(not (torch.cuda.is_available() and has_cupy()), reason="needs a GPU and CuPy")
def test_a_real_process_ends_although_it_left_a_start_behind() -> None:
    code = """
from penstock.errors import WeightPushFailed
from penstock.weights import cuda
from penstock.weights.transports import Deadline
group = cuda.NcclGroup(2, rank=0, device_index=0)
try:
    group.open(Deadline(10, "meeting"), cuda.nccl().get_unique_id)
except WeightPushFailed as error:
    print(error)
group.abort()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert "meeting took longer than 10 s" in ended.stdout, ended.stderr
    assert "it is left behind in its thread" in ended.stderr
    assert ended.returncode == 0


def test_no_rank_starts_before_every_rank_is_ready(nccl: NcclStandIn) -> None:
    """A start that waits for a rank cannot be ended. So no one starts because of a rank that refuses, or dies early."""
    sender, staged = NcclSender(HOST, CPU), staged_version(1)
    members = [target("a"), target("never comes")]
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(2 * SHORT_S, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    stage = start_stage(staged, rendezvous, 1, 3)
    with pytest.raises(WeightPushFailed, match="longer than 2 s"):
        sender.send(shipment, members, deadline)
    sender.close(failed=True)
    stage.abort()
    stage.done.result(PROMPT_S)
    assert stage.phase == "failed"
    assert nccl.num_inits == 0
    push(sender, staged, [target("a")])


def test_the_stand_in_has_the_functions_of_cupy() -> None:
    """By the signatures that CuPy's compiled functions carry in their docstrings. Needs NCCL, but no GPU."""
    real = pytest.importorskip("cupy.cuda.nccl")
    assert (real.NCCL_UINT8, real.NCCL_SUM) == (NcclStandIn.NCCL_UINT8, NcclStandIn.NCCL_SUM)
    assert issubclass(real.NcclError, RuntimeError)
    assert len(real.get_unique_id()) == UNIQUE_ID_BYTES
    assert re.fullmatch(r"\d+\.\d+\.\d+", cuda.nccl_version())
    for name in ("bcast", "allReduce", "check_async_error", "abort"):
        signature = getattr(real.NcclCommunicator, name).__doc__.splitlines()[0]
        parameters = [declared.split()[-1] for declared in signature.partition("(")[2].rstrip(")").split(",")]
        assert parameters == list(inspect.signature(getattr(NcclCommunicatorStandIn, name)).parameters)
    assert "NcclCommunicator(int ndev, bytes commId, int rank," in real.NcclCommunicator.__doc__


def test_a_group_is_aborted_also_as_the_interpreter_ends(nccl: NcclStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread then."""
    group = group_of(1)
    group.open(Deadline(DEADLINE_S, "meeting"), meet)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    group.abort()
    assert nccl.num_aborts == 1


def test_memory_is_held_until_nccl_is_off_it(nccl: NcclStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort that hangs must not free memory that the GPU still writes to."""
    monkeypatch.setattr(cuda, "ABORT_TIMEOUT_S", 0.2)
    group, deadline = group_of(1), Deadline(DEADLINE_S, "broadcasting")
    group.open(deadline, meet)
    gate = threading.Event()
    nccl.runtime.enqueue(group._stream.handle, gate.wait)

    class Owner:
        pass

    owner, gone = Owner(), threading.Event()
    weakref.finalize(owner, gone.set)
    tensor = torch.zeros(64, dtype=torch.uint8)
    group.broadcast(tensor.data_ptr(), 64, deadline, hold=owner)
    del owner
    group.abort()
    assert not gone.is_set()
    gate.set()
    assert gone.wait(PROMPT_S)


@pytest.fixture(params=["device", "host"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways to send a bucket: broadcast it in place, or by way of two device buffers."""
    if request.param == "device":
        monkeypatch.setattr(sending, "is_on_gpu", lambda wire: True)
        monkeypatch.setattr(receiving, "is_gpu", lambda device: True)
    return str(request.param)


def target(name: str) -> PushTarget:
    return PushTarget(name, f"{name}:1", devices=("GPU",), transports=("nccl",))


def staged_version(version: int, term: int = 1) -> StagedVersion:
    tensors = [TensorShape(f"t{index}", "F32", (97 + index,)) for index in range(NUM_TENSORS)]
    manifest = build_manifest("run", version, term, tensors, bucket_bytes=1024)
    staged = StagedVersion(manifest, HostBuckets([b.num_bytes for b in manifest.buckets]))
    manifest.checksum = checksum_name(staged.memory)
    generator = torch.Generator().manual_seed(version)
    for spec in tensors:
        staged.put(spec.name, torch.rand(spec.shape, generator=generator))
    return staged


def start_stage(staged: StagedVersion, rendezvous: str, rank: int, world_size: int) -> WeightStage:
    announcement = weights_pb2.AnnounceRequest(
        manifest=staged.manifest, transport="nccl", rendezvous=rendezvous, rank=rank, world_size=world_size,
        deadline_s=DEADLINE_S,
    )  # fmt: skip
    stage = WeightStage(announcement, Path("unused"), groups=GROUPS)
    stage.start()
    return stage


def push(
    sender: NcclSender, staged: StagedVersion, members: list[PushTarget], deltas: tuple[torch.Tensor | None, ...] = ()
) -> None:
    """Transfer a version to every member, and check what arrives."""
    shipment, deadline = Shipment(staged.manifest, staged, deltas), Deadline(DEADLINE_S, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    stages = [start_stage(staged, rendezvous, rank + 1, len(members) + 1) for rank in range(len(members))]
    sender.send(shipment, members, deadline)
    sender.close(failed=False)
    for stage in stages:
        stage.done.result(DEADLINE_S)
        assert stage.phase == "received", stage.failure
        assert stage.mismatch(staged.checksums(Deadline(DEADLINE_S, "hashing"))) == ""
        assert all(torch.equal(a, b) for a, b in zip(stage.buckets, staged.memory.buckets, strict=True))


def test_wires_in_host_memory_travel_between_buckets_of_a_gpu(
    nccl: NcclStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staged_version(1)
    on_gpu = {bucket.data_ptr() for bucket in staged.memory.buckets}
    monkeypatch.setattr(sending, "is_on_gpu", lambda wire: wire.data_ptr() in on_gpu)
    monkeypatch.setattr(receiving, "is_gpu", lambda device: True)
    copies = [bucket.clone() if index % 2 else None for index, bucket in enumerate(staged.memory.buckets)]
    push(NcclSender(HOST, CPU), staged, [target("a")], tuple(copies))


def test_a_new_learner_ends_the_groups_of_the_one_before(nccl: NcclStandIn) -> None:
    push(NcclSender(HOST, CPU), staged_version(1, term=1), [target("a")])
    push(NcclSender(HOST, CPU), staged_version(2, term=2), [target("a")])
    assert nccl.num_aborts == 1


def test_a_late_joiner_makes_a_new_group_and_the_old_one_is_abandoned(nccl: NcclStandIn) -> None:
    sender = NcclSender(HOST, CPU)
    push(sender, staged_version(1), [target("a")])
    push(sender, staged_version(2), [target("a"), target("b")])
    assert nccl.num_inits == 2 + 3
    assert nccl.num_aborts == 2, "the publisher's and the member's end of the first group"


def test_a_member_that_hangs_in_a_broadcast_costs_a_deadline(nccl: NcclStandIn, memory: str) -> None:
    sender = NcclSender(HOST, CPU)
    members = [target("a"), target("hangs")]
    push(sender, staged_version(1), members)
    nccl.silent_ranks.add(2)
    staged = staged_version(2)
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(SHORT_S, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    stages = [start_stage(staged, rendezvous, rank, 3) for rank in (1, 2)]
    with pytest.raises(WeightPushFailed, match="longer than 1 s"):
        sender.send(shipment, members, deadline)
    sender.close(failed=True)
    for stage in stages:
        stage.abort()
        stage.done.result(PROMPT_S)
        assert stage.phase == "failed"
    nccl.silent_ranks.clear()
    push(sender, staged, [target("a")])


def test_a_stage_that_is_aborted_ends_soon_and_leaves_the_group(nccl: NcclStandIn, memory: str) -> None:
    staged, sender = staged_version(1), NcclSender(HOST, CPU)
    rendezvous = sender.open(Shipment(staged.manifest, staged), [target("a")], Deadline(DEADLINE_S, "opening"))
    stage = start_stage(staged, rendezvous, 1, 2)
    stage.abort()
    stage.done.result(PROMPT_S)
    assert "aborted" in stage.failure
    again = start_stage(staged, rendezvous.replace('"kept": false', '"kept": true'), 1, 2)
    again.done.result(PROMPT_S)
    assert "has left the NCCL group" in again.failure


def test_a_member_waits_for_the_others_no_longer_than_leaves_time_for_its_commit(
    nccl: NcclStandIn, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member may be stopped after the publisher's barrier has ended, and before that of the others. The commit that
    follows has the same deadline."""
    waits: dict[int, list[float]] = {}
    wait = NcclGroup.wait

    def watched(group: NcclGroup, event: int, deadline: Deadline) -> None:
        waits.setdefault(group._rank, []).append(deadline.remaining_s)
        wait(group, event, deadline)

    monkeypatch.setattr(NcclGroup, "wait", watched)
    push(NcclSender(HOST, CPU), staged_version(1), [target("a"), target("b")])
    for rank in (1, 2):
        *buckets, barrier = waits[rank]
        assert buckets and barrier <= DEADLINE_S / 2 < buckets[0]


def test_a_member_leaves_the_group_if_another_one_does_not_enter_the_barrier(
    nccl: NcclStandIn, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier that never ends would occupy the GPU, and the next load, which synchronizes the device, would hang."""
    enter = NcclGroup.enter_barrier

    def enter_unless_second(group: NcclGroup, deadline: Deadline) -> int:
        if group._rank == 2 and group.is_open:
            raise WeightPushFailed("this rank has failed")
        return enter(group, deadline)

    monkeypatch.setattr(NcclGroup, "enter_barrier", enter_unless_second)
    sender, staged = NcclSender(HOST, CPU), staged_version(1)
    members = [target("a"), target("fails")]
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(4 * SHORT_S, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    stages = [start_stage(staged, rendezvous, rank, 3) for rank in (1, 2)]
    with pytest.raises(WeightPushFailed):
        sender.send(shipment, members, deadline)
    sender.close(failed=True)
    for stage in stages:
        stage.abort()
        stage.done.result(PROMPT_S)
        assert stage.mismatch(staged.checksums(Deadline(DEADLINE_S, "hashing"))) == "", "it has every bucket"
    assert nccl.num_communicators == 0, "no barrier is left on a GPU"
