"""gloo with publisher and stage in one process: buckets in several pieces, and a broadcast that stalls."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from penstock.errors import WeightPushFailed
from penstock.machine import address_towards
from penstock.v1 import weights_pb2
from penstock.weights.transports import (
    GLOO_PIECE_BYTES,
    XXH3_PIECES,
    Deadline,
    TensorShape,
    build_manifest,
    host_checksum,
)
from penstock_learner.weights.senders import GlooSender, PushTarget, Shipment
from penstock_learner.weights.staging import HostBuckets, StagedVersion
from penstock_rollout.weights.receivers import gloo
from penstock_rollout.weights.stage import WeightStage
from support.processes import listeners

DEADLINE_S = 60.0
HOST = "127.0.0.1"
SHAPES = [("embed", (3, 700_001)), ("norm", (5,)), ("layer", (1000, 1001)), ("head", (7,))]


def stage_version(dtype: torch.dtype, name: str) -> tuple[StagedVersion, dict[str, torch.Tensor]]:
    """Stage float32 weights in buckets of several pieces, with padding."""
    tensors = [TensorShape(tensor, name, shape) for tensor, shape in SHAPES]
    manifest = build_manifest("run", 1, 1, tensors, bucket_bytes=9 * 2**20)
    staged = StagedVersion(manifest, HostBuckets([bucket.num_bytes for bucket in manifest.buckets]))
    generator = torch.Generator().manual_seed(0)
    weights = {tensor: torch.rand(shape, generator=generator) for tensor, shape in SHAPES}
    for tensor, weight in weights.items():
        staged.put(tensor, weight)
    return staged, weights


def start_stage(staged: StagedVersion, rendezvous: str) -> WeightStage:
    announcement = weights_pb2.AnnounceRequest(
        manifest=staged.manifest, transport="gloo", rendezvous=rendezvous, rank=1, world_size=2, deadline_s=DEADLINE_S
    )
    stage = WeightStage(announcement, Path("unused"))
    stage.start()
    return stage


def silent_pair() -> tuple[ProcessGroupGloo, ProcessGroupGloo]:
    """A group of two ranks, none of which does anything."""
    timeout = timedelta(seconds=DEADLINE_S)
    store = TCPStore(HOST, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
    joined = TCPStore(HOST, store.port, 2, is_master=False, timeout=timeout)
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(ProcessGroupGloo, PrefixStore("silent", joined), 1, 2, timeout)
        return ProcessGroupGloo(PrefixStore("silent", store), 0, 2, timeout), other.result()


def test_the_rendezvous_listens_on_its_host_only() -> None:
    before = listeners([psutil.Process()])
    staged, _ = stage_version(torch.float32, "F32")
    sender = GlooSender(HOST, 8)
    rendezvous = sender.open(Shipment(staged.manifest, staged), [PushTarget("a", "")], Deadline(DEADLINE_S, "opening"))
    opened = listeners([psutil.Process()]).keys() - before.keys()
    sender.close(failed=False)
    assert opened == {rendezvous.partition("/")[0].replace(":", " ")}


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no address 127.0.0.3")
def test_a_member_listens_on_its_address_towards_the_publisher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of the machine's name may be 127.0.1.1, which members on other machines cannot reach."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert address_towards("127.0.0.1", 1) == "127.0.0.1"
    before = listeners([psutil.Process()])
    options = gloo._options("127.0.0.3", DEADLINE_S)
    opened = listeners([psutil.Process()]).keys() - before.keys()
    assert opened and all(address.startswith("127.0.0.3 ") for address in opened)
    del options


def test_a_host_of_another_machine_is_named() -> None:
    staged, _ = stage_version(torch.float32, "F32")
    with pytest.raises(WeightPushFailed, match=r"cannot listen on 192\.0\.2\.77: .*; check learner\.publish_host"):
        GlooSender("192.0.2.77", 8).open(Shipment(staged.manifest, staged), [], Deadline(DEADLINE_S, "opening"))


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_a_bucket_of_several_pieces_is_hashed_whole_on_both_sides(dtype: torch.dtype, name: str) -> None:
    staged, weights = stage_version(dtype, name)
    assert any(bucket.num_bytes > GLOO_PIECE_BYTES for bucket in staged.manifest.buckets)
    deadline = Deadline(DEADLINE_S, "sending")
    checksums = staged.checksums(deadline)
    assert checksums == [host_checksum(XXH3_PIECES, bucket.numpy()) for bucket in staged.memory.buckets]

    sender, members = GlooSender(HOST, 8), [PushTarget("member", "unused")]
    shipment = Shipment(staged.manifest, staged)
    stage = start_stage(staged, sender.open(shipment, members, deadline))
    sender.send(shipment, members, deadline)
    stage.done.result(DEADLINE_S)
    sender.close(failed=False)
    assert stage.phase == "received", stage.failure
    assert stage.mismatch(checksums) == ""
    received = dict(stage.tensors())
    assert received.keys() == weights.keys()
    for tensor, weight in weights.items():
        np.testing.assert_array_equal(received[tensor].float(), weight.to(dtype).float())


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "F32"), (torch.bfloat16, "BF16")])
def test_a_weight_that_was_staged_can_be_freed_as_fsdp_frees_it(dtype: torch.dtype, name: str) -> None:
    _, weights = stage_version(dtype, name)
    for weight in weights.values():
        weight.untyped_storage().resize_(0)


def test_a_stage_that_is_aborted_in_the_middle_of_stalled_broadcasts_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An aborted stage must release its memory at once, not at the deadline, however many pieces are in flight."""
    staged, _ = stage_version(torch.float32, "F32")
    options_of, calls, is_stalled = gloo._from_sender, [], threading.Event()

    def note_broadcast() -> BroadcastOptions:
        calls.append(None)
        if len(calls) == 2:  # the first piece is in flight, and the second one follows
            is_stalled.set()
        return options_of()

    monkeypatch.setattr(gloo, "_from_sender", note_broadcast)
    timeout = timedelta(seconds=DEADLINE_S)
    store = TCPStore(HOST, 0, 2, is_master=True, timeout=timeout, wait_for_workers=False)
    stage = start_stage(staged, f"{HOST}:{store.port}/stalled/8")
    silent = ProcessGroupGloo(PrefixStore("stalled/all", store), 0, 2, timeout)
    assert is_stalled.wait(DEADLINE_S), stage.failure
    assert stage.phase == "receiving"
    stage.abort()
    stage.done.result(DEADLINE_S / 2)  # it does not wait for the deadline of its broadcasts
    assert stage.phase == "failed"
    assert "aborted" in stage.failure
    del silent


@pytest.mark.parametrize("rank", [0, 1])
def test_the_connections_of_an_idle_group_are_broken_too(rank: int) -> None:
    """A relay whose own group breaks may wait for nothing from the publisher, which must learn of it nevertheless."""
    groups = silent_pair()
    gloo.break_connections(groups[rank], [])
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = rank, 0, timedelta(seconds=DEADLINE_S)
    with pytest.raises(RuntimeError, match="[Cc]onnection"):
        groups[1 - rank].broadcast([torch.zeros(1, dtype=torch.uint8)], options).wait()


def test_a_group_is_broken_while_its_sender_goes_on() -> None:
    """Gloo ends the process if the next piece meets an operation that expects less."""
    sender, receiver = silent_pair()
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    works = [sender.broadcast([torch.zeros(2**22, dtype=torch.uint8)], options) for _ in range(4)]
    gloo.break_connections(receiver, [])
    for work in works:
        with pytest.raises(RuntimeError):
            work.wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_broadcast_that_a_silent_peer_stalls_is_broken_from_either_end(rank: int) -> None:
    """Otherwise the group's destructor would wait for the broadcast's time-out."""
    groups = silent_pair()
    options = BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work = groups[rank].broadcast([torch.zeros(2**26, dtype=torch.uint8)], options)
    gloo.break_connections(groups[rank], [work])
    assert work.is_completed()
    with pytest.raises(RuntimeError):
        work.wait()


def failure_of(sender: GlooSender, shipment: Shipment, members: list[PushTarget], deadline: Deadline) -> str:
    """Send, and return why that failed, after the group is gone."""
    try:
        sender.send(shipment, members, deadline)
    except WeightPushFailed as error:
        return str(error)
    return ""


def test_a_meeting_ends_at_the_deadline_of_the_push() -> None:
    """Gloo gives each worker the whole time. Here one joins after a tenth of it, then the next one, and so on."""
    timeout_s, num_workers = 1.0, 100
    staged, _ = stage_version(torch.float32, "F32")
    members = [PushTarget(f"member-{number}", "") for number in range(num_workers)]
    sender, shipment = GlooSender(HOST, num_workers), Shipment(staged.manifest, staged)
    address, prefix, _ = sender.open(shipment, members, Deadline(DEADLINE_S, "opening")).split("/")
    joined, has_ended = [], threading.Event()

    def join(rank: int) -> None:
        timeout = timedelta(seconds=4 * timeout_s)
        with contextlib.suppress(RuntimeError):  # the others do not come
            store = TCPStore(HOST, int(address.rpartition(":")[2]), is_master=False, timeout=timeout)
            joined.append(rank)
            ProcessGroupGloo(PrefixStore(f"{prefix}/all", store), rank, num_workers + 1, timeout)

    def join_one_by_one() -> None:
        for rank in range(1, num_workers + 1):
            if has_ended.wait(timeout_s / 10):
                return
            threading.Thread(target=join, args=(rank,), daemon=True).start()

    threading.Thread(target=join_one_by_one, daemon=True).start()
    failure = failure_of(sender, shipment, members, Deadline(timeout_s, "sending"))
    has_ended.set()
    assert len(joined) < num_workers
    assert "sending took longer than 1 s" in failure


class SlowShipment(Shipment):
    """Its first bucket comes when almost no time is left."""

    def wires(self, deadline: Deadline) -> Iterator[torch.Tensor]:
        deadline._ends_at = time.monotonic() + 0.5
        yield from super().wires(deadline)


def test_broadcasts_that_stall_end_at_the_deadline_of_the_push() -> None:
    """The group was formed with more time than is left. Its destructor waits for its broadcasts."""
    staged, _ = stage_version(torch.float32, "F32")
    sender, members, shipment = GlooSender(HOST, 8), [PushTarget("member", "")], SlowShipment(staged.manifest, staged)
    address, prefix, _ = sender.open(shipment, members, Deadline(DEADLINE_S, "opening")).split("/")
    timeout = timedelta(seconds=DEADLINE_S)
    store = TCPStore(HOST, int(address.rpartition(":")[2]), is_master=False, timeout=timeout)
    with ThreadPoolExecutor(2) as threads:
        joining = threads.submit(ProcessGroupGloo, PrefixStore(f"{prefix}/all", store), 1, 2, timeout)
        sending = threads.submit(failure_of, sender, shipment, members, Deadline(DEADLINE_S, "sending"))
        silent = joining.result(DEADLINE_S)
        assert "the broadcast broke" in sending.result(DEADLINE_S / 2)
        del silent
