"""nccl: receive the publisher's broadcasts on a stream of its own, while the engine decodes."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import WeightPushFailed, first_line_of
from penstock.weights.cuda.nccl_group import MAX_ENQUEUED, NcclGroup, NcclMeeting
from penstock.weights.cuda.relay import NUM_SLOTS, Relay
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import wire_sizes
from penstock_rollout.weights.reception import Arrived, Reception


def receive(reception: Reception) -> Iterator[Arrived]:
    """Yield buckets on the engine's GPU, or in pinned host memory through two buffers on the GPU.

    The rendezvous is an NcclMeeting. The communicator is kept for the group's next push, unless this one fails."""
    meeting = NcclMeeting.from_json(reception.rendezvous)
    joined = _groups.join(meeting, reception)
    try:
        if not joined.group.is_open:
            joined.group.open(reception.deadline)
        if is_gpu(reception.device):
            yield from _to_device(joined.group, reception)
        else:
            yield from _to_host(joined, reception)
    except BaseException as error:
        _groups.drop(joined)
        if isinstance(error, RuntimeError):
            first_line = first_line_of(error)
            raise WeightPushFailed(f"the NCCL broadcast broke: {first_line}") from error
        raise


def _to_device(group: NcclGroup, reception: Reception) -> Iterator[Arrived]:
    enqueued: deque[tuple[torch.Tensor, int]] = deque()
    for num_bytes in wire_sizes(reception.manifest):
        wire = reception.buffer(num_bytes, reception.device)
        enqueued.append((wire, group.broadcast(wire.data_ptr(), num_bytes, reception.deadline, hold=wire)))
        if len(enqueued) >= MAX_ENQUEUED:
            yield _oldest(group, enqueued, reception.deadline)
    while enqueued:
        yield _oldest(group, enqueued, reception.deadline)


def _oldest(group: NcclGroup, enqueued: deque[tuple[torch.Tensor, int]], deadline: Deadline) -> Arrived:
    wire, event = enqueued.popleft()
    group.wait(event, deadline)
    return Arrived(wire)


def _to_host(joined: _Joined, reception: Reception) -> Iterator[Arrived]:
    relay = joined.relay_for(max(bucket.num_bytes for bucket in reception.manifest.buckets))
    enqueued: deque[tuple[torch.Tensor, tuple[int, int]]] = deque()
    for num_bytes in wire_sizes(reception.manifest):
        if len(enqueued) >= NUM_SLOTS:
            yield _oldest_copy(relay, enqueued, reception.deadline)
        wire = reception.buffer(num_bytes, torch.device("cpu"))
        enqueued.append((wire, relay.receive(wire.data_ptr(), num_bytes, reception.deadline, hold=wire)))
    while enqueued:
        yield _oldest_copy(relay, enqueued, reception.deadline)


def _oldest_copy(relay: Relay, enqueued: deque[tuple[torch.Tensor, tuple[int, int]]], deadline: Deadline) -> Arrived:
    wire, events = enqueued.popleft()
    relay.wait(events, deadline)
    return Arrived(wire)


@dataclass(eq=False)
class _Joined:
    """A group that this process has joined, and its rank in it."""

    meeting: NcclMeeting
    rank: int
    term: int
    group: NcclGroup
    relay: Relay | None = None

    def relay_for(self, max_bytes: int) -> Relay:
        if self.relay is None or self.relay.max_bytes < max_bytes:
            self.relay = Relay(self.group, max_bytes)
        return self.relay


class _Groups:
    """The groups that this process has joined: one per sender, and none of a learner with an outdated term."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: list[_Joined] = []

    def join(self, meeting: NcclMeeting, reception: Reception) -> _Joined:
        term = reception.manifest.term
        with self._lock:
            past = [j for j in self._joined if j.term < term or _is_replaced(j.meeting, meeting)]
            self._joined = [joined for joined in self._joined if joined not in past]
            found = [j for j in self._joined if (j.meeting.group, j.rank) == (meeting.group, reception.rank)]
        for joined in past:
            joined.group.abort()
        if found:
            return found[0]
        if meeting.kept:
            raise WeightPushFailed("this worker has left the NCCL group of the push; the publisher must form a new one")
        unique_id = bytes.fromhex(meeting.unique_id)
        device_index = reception.worker_device.index or 0
        group = NcclGroup(unique_id, reception.announcement.world_size, reception.rank, device_index)
        joined = _Joined(meeting, reception.rank, term, group)
        with self._lock:
            self._joined.append(joined)
        return joined

    def drop(self, joined: _Joined) -> None:
        with self._lock:
            self._joined = [other for other in self._joined if other is not joined]
        joined.group.abort()

    def drop_all(self) -> None:
        for joined in list(self._joined):
            self.drop(joined)


def _is_replaced(old: NcclMeeting, new: NcclMeeting) -> bool:
    return old.sender == new.sender and old.group != new.group


_groups = _Groups()
atexit.register(_groups.drop_all)


def is_gpu(device: Any) -> bool:
    return bool(device.type == "cuda")
