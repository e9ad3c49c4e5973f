"""Sender and receiver of nccl over stand-ins for CuPy: content, kept communicators, deadlines, aborts, dead members."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cuda_stand_in import RuntimeStandIn
from nccl_stand_in import NcclStandIn
from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.cuda import libraries, nccl_group
from penstock.weights.cuda.nccl_group import NcclGroup, nonblocking_config
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import TensorShape, build_manifest
from penstock_learner.weights.memory import HostMemory
from penstock_learner.weights.senders import nccl as sending
from penstock_learner.weights.senders.nccl import NcclSender
from penstock_learner.weights.senders.sender import PushTarget, Shipment
from penstock_learner.weights.staging import StagedVersion, checksum_name
from penstock_rollout.weights.receivers import nccl as receiving
from penstock_rollout.weights.stage import WeightStage

DEADLINE_S = 60.0
SHORT_S = 1.0
PROMPT_S = 25.0
"""Longer than a deadline of SHORT_S plus an abort on a busy machine, and far shorter than DEADLINE_S."""
NUM_TENSORS = 9


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[NcclStandIn]:
    runtime = RuntimeStandIn()
    stand_in = NcclStandIn(runtime)
    monkeypatch.setattr(libraries, "runtime", lambda: runtime)
    monkeypatch.setattr(libraries, "nccl", lambda: stand_in)
    yield stand_in
    receiving._groups.drop_all()
    stand_in.stop()


@pytest.fixture(params=["device", "host"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two ways to send a bucket: broadcast it in place, or by way of two device buffers."""
    if request.param == "device":
        monkeypatch.setattr(sending, "is_on_gpu", lambda wire: True)
        monkeypatch.setattr(receiving, "is_gpu", lambda device: True)
    return str(request.param)


def target(name: str, num_workers: int = 1) -> PushTarget:
    return PushTarget(name, f"{name}:1", devices=("GPU",) * num_workers, transports=("nccl",))


def staged_version(version: int, term: int = 1, num_items: int = 97) -> StagedVersion:
    tensors = [TensorShape(f"t{index}", "F32", (num_items + index,)) for index in range(NUM_TENSORS)]
    manifest = build_manifest("run", version, term, tensors, bucket_bytes=1024)
    staged = StagedVersion(manifest, HostMemory([b.num_bytes for b in manifest.buckets]))
    manifest.checksum = checksum_name(staged.memory)
    generator = torch.Generator().manual_seed(version)
    for spec in tensors:
        staged.put(spec.name, torch.rand(spec.shape, generator=generator))
    return staged


def start_stage(
    manifest: weights_pb2.WeightManifest, rendezvous: str, rank: int, world_size: int, timeout_s: float = DEADLINE_S
) -> WeightStage:
    announcement = weights_pb2.AnnounceRequest(
        manifest=manifest, transport="nccl", rendezvous=rendezvous, rank=rank, world_size=world_size,
        deadline_s=timeout_s,
    )  # fmt: skip
    stage = WeightStage(announcement, Path("unused"))
    stage.start()
    return stage


def push(
    sender: NcclSender, staged: StagedVersion, members: list[PushTarget], timeout_s: float = DEADLINE_S
) -> list[WeightStage]:
    """Transfer a version to every worker. Returns the stages when they are done."""
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(timeout_s, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    num_workers = sum(len(member.devices) for member in members)
    stages = [
        start_stage(staged.manifest, rendezvous, rank, num_workers + 1, timeout_s) for rank in range(1, num_workers + 1)
    ]
    sender.send(shipment, members, deadline)
    sender.close(failed=False)
    for stage in stages:
        stage.done.result(timeout_s)
    return stages


def assert_received(stages: list[WeightStage], staged: StagedVersion) -> None:
    for stage in stages:
        assert stage.phase == "received", stage.failure
        assert stage.mismatch(staged.checksums(Deadline(DEADLINE_S, "hashing"))) == ""
        assert all(torch.equal(a, b) for a, b in zip(stage.buckets, staged.memory.buckets, strict=True))


def test_every_worker_of_every_member_gets_the_bytes(nccl: NcclStandIn, memory: str) -> None:
    staged = staged_version(1)
    assert len(staged.manifest.buckets) > 2, "more buckets than slots"
    stages = push(NcclSender(torch.device("cpu")), staged, [target("a"), target("b", num_workers=2)])
    assert len(stages) == 3
    assert_received(stages, staged)


def test_deltas_in_host_memory_travel_between_buckets_of_a_gpu(
    nccl: NcclStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged = staged_version(1)
    on_gpu = {bucket.data_ptr() for bucket in staged.memory.buckets}
    monkeypatch.setattr(sending, "is_on_gpu", lambda wire: wire.data_ptr() in on_gpu)
    monkeypatch.setattr(receiving, "is_gpu", lambda device: True)
    copies = [bucket.clone() if index % 2 else None for index, bucket in enumerate(staged.memory.buckets)]
    shipment, deadline = Shipment(staged.manifest, staged, tuple(copies)), Deadline(DEADLINE_S, "sending")
    sender = NcclSender(torch.device("cpu"))
    stage = start_stage(staged.manifest, sender.open(shipment, [target("a")], deadline), 1, 2)
    sender.send(shipment, [target("a")], deadline)
    stage.done.result(DEADLINE_S)
    assert_received([stage], staged)


def test_the_communicator_is_kept_while_the_members_are_the_same(nccl: NcclStandIn, memory: str) -> None:
    sender = NcclSender(torch.device("cpu"))
    for version in range(1, 5):
        staged = staged_version(version)
        assert_received(push(sender, staged, [target("a"), target("b")]), staged)
    assert (nccl.num_inits, nccl.num_aborts) == (3, 0)


def test_a_late_joiner_makes_a_new_group_and_the_old_one_is_given_up(nccl: NcclStandIn) -> None:
    sender = NcclSender(torch.device("cpu"))
    push(sender, staged_version(1), [target("a")])
    staged = staged_version(2)
    assert_received(push(sender, staged, [target("a"), target("b")]), staged)
    assert nccl.num_inits == 2 + 3
    assert nccl.num_aborts == 2, "the publisher's and the member's end of the first group"


def test_a_new_learner_ends_the_groups_of_the_one_before(nccl: NcclStandIn) -> None:
    push(NcclSender(torch.device("cpu")), staged_version(1, term=1), [target("a")])
    staged = staged_version(2, term=2)
    assert_received(push(NcclSender(torch.device("cpu")), staged, [target("a")]), staged)
    assert nccl.num_aborts == 1


def test_a_member_that_never_comes_costs_a_deadline_and_the_next_push_works(nccl: NcclStandIn) -> None:
    sender = NcclSender(torch.device("cpu"))
    staged, members = staged_version(1), [target("a"), target("dead")]
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(SHORT_S, "sending")
    stage = start_stage(staged.manifest, sender.open(shipment, members, deadline), 1, 3, SHORT_S)
    with pytest.raises(WeightPushFailed, match="longer than 1 s"):
        sender.send(shipment, members, deadline)
    sender.close(failed=True)
    stage.done.result(DEADLINE_S)
    assert "longer than 1 s" in stage.failure
    assert nccl.num_aborts == 2
    assert_received(push(sender, staged, [target("a")]), staged)


def test_a_member_that_hangs_in_a_broadcast_costs_a_deadline(nccl: NcclStandIn, memory: str) -> None:
    sender = NcclSender(torch.device("cpu"))
    members = [target("a"), target("hangs")]
    push(sender, staged_version(1), members)
    nccl.silent_ranks.add(2)
    staged = staged_version(2)
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(SHORT_S, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    stages = [start_stage(staged.manifest, rendezvous, rank, 3) for rank in (1, 2)]
    with pytest.raises(WeightPushFailed, match="longer than 1 s"):
        # Gloo lets rank 0 continue when its own part is done. NCCL's kernel would wait here too.
        nccl.silent_ranks.add(0)
        sender.send(shipment, members, deadline)
    sender.close(failed=True)
    for stage in stages:
        stage.abort()
        stage.done.result(PROMPT_S)
        assert stage.phase == "failed"
    nccl.silent_ranks.clear()
    assert_received(push(sender, staged, [target("a")]), staged)


def test_a_stage_that_is_aborted_ends_soon_and_leaves_the_group(nccl: NcclStandIn, memory: str) -> None:
    staged, members = staged_version(1), [target("a")]
    sender = NcclSender(torch.device("cpu"))
    shipment = Shipment(staged.manifest, staged)
    rendezvous = sender.open(shipment, members, Deadline(DEADLINE_S, "opening"))
    stage = start_stage(staged.manifest, rendezvous, 1, 2)
    stage.abort()
    stage.done.result(PROMPT_S)
    assert "aborted" in stage.failure
    again = start_stage(staged.manifest, rendezvous.replace('"kept": false', '"kept": true'), 1, 2)
    again.done.result(PROMPT_S)
    assert "has left the NCCL group" in again.failure


def test_an_asynchronous_error_fails_the_transfer_at_once(nccl: NcclStandIn, memory: str) -> None:
    nccl.broken_ranks.add(0)
    sender = NcclSender(torch.device("cpu"))
    staged, members = staged_version(1), [target("a")]
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(DEADLINE_S, "sending")
    stage = start_stage(staged.manifest, sender.open(shipment, members, deadline), 1, 2)
    with pytest.raises(WeightPushFailed, match="REMOTE_ERROR"):
        sender.send(shipment, members, deadline)
    sender.close(failed=True)
    stage.abort()
    stage.done.result(PROMPT_S)
    assert stage.phase == "failed"


@pytest.mark.long
@pytest.mark.parametrize("dies", ["before it meets the others", "while it meets them", "in the middle of a broadcast"])
def test_a_member_that_is_killed_costs_no_more_than_a_deadline_and_the_others_go_on(
    dies: str, nccl: NcclStandIn
) -> None:
    sender = NcclSender(torch.device("cpu"))
    # More than the sockets buffer, so that the publisher notices a member that stopped reading.
    staged, members = staged_version(1, num_items=2**20), [target("killed"), target("b")]
    shipment, deadline = Shipment(staged.manifest, staged), Deadline(DEADLINE_S, "sending")
    rendezvous = sender.open(shipment, members, deadline)
    with member_process(staged.manifest, rendezvous, rank=1, world_size=3) as process:
        if dies == "before it meets the others":
            process.kill()
            process.wait()
        else:
            tell(process, "meet")
            hear(process, "meeting")
        if dies == "while it meets them":
            process.kill()
            process.wait()
        survivor = start_stage(staged.manifest, rendezvous, rank=2, world_size=3)
        deadline = Deadline(SHORT_S if process.returncode is not None else DEADLINE_S, "sending")
        with ThreadPoolExecutor(1) as pool:
            sending_now = pool.submit(sender.send, shipment, members, deadline)
            if process.returncode is None:
                hear(process, "bucket")
                process.kill()
            with pytest.raises(WeightPushFailed):
                sending_now.result(DEADLINE_S)
    sender.close(failed=True)
    survivor.abort()
    survivor.done.result(PROMPT_S)
    assert survivor.phase == "failed"
    assert_received(push(sender, staged, [target("b")]), staged)


@contextmanager
def member_process(
    manifest: weights_pb2.WeightManifest, rendezvous: str, rank: int, world_size: int
) -> Iterator[subprocess.Popen[str]]:
    """Start nccl_member.py: a member in a separate process, which stops after its first bucket."""
    script = Path(__file__).parents[2] / "nccl_member.py"
    arguments = [manifest.SerializeToString().hex(), rendezvous, str(rank), str(world_size)]
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        hear(process, "ready")
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def hear(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line


def test_abort_from_another_thread_ends_a_start_that_waits(nccl: NcclStandIn) -> None:
    group = NcclGroup(nccl.get_unique_id(), world_size=2, rank=0, device_index=0)
    failures: list[BaseException] = []

    def open_group() -> None:
        try:
            group.open(Deadline(DEADLINE_S, "meeting"))
        except WeightPushFailed as error:
            failures.append(error)

    thread = threading.Thread(target=open_group)
    thread.start()
    assert nccl.init_began.wait(DEADLINE_S)
    group.abort()
    thread.join(PROMPT_S)
    assert not thread.is_alive()
    assert "was aborted" in str(failures[0])
    assert not group.is_open


def test_memory_is_held_until_nccl_is_off_it(nccl: NcclStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort that hangs must not free memory that the GPU still writes to."""
    monkeypatch.setattr(nccl_group, "ABORT_TIMEOUT_S", 0.2)
    group = NcclGroup(nccl.get_unique_id(), world_size=1, rank=0, device_index=0)
    deadline = Deadline(DEADLINE_S, "broadcasting")
    group.open(deadline)
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


def test_without_a_nonblocking_start_a_missing_rank_still_costs_only_the_deadline(
    nccl: NcclStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(NcclStandIn, "NcclConfig")
    monkeypatch.setattr(nccl_group, "ABORT_TIMEOUT_S", 0.2)
    assert nonblocking_config(nccl) is None
    staged = staged_version(1)
    assert_received(push(NcclSender(torch.device("cpu")), staged, [target("a")]), staged)
    group = NcclGroup(nccl.get_unique_id(), world_size=2, rank=0, device_index=0)
    with pytest.raises(WeightPushFailed, match="longer than 1 s"):
        group.open(Deadline(SHORT_S, "meeting"))
    group.abort()
