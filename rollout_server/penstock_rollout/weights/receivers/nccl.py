"""nccl: receive the publisher's broadcasts on a separate stream, while the engine decodes."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.errors import WeightPushFailed, first_line_of
from penstock.weights.cuda import MAX_ENQUEUED, NUM_SLOTS, NcclGroup, NcclMeeting, Relay
from penstock.weights.manifest import wire_sizes
from penstock_rollout.weights.stage import Arrived, Reception

logger = logging.getLogger(__name__)


def receive(reception: Reception) -> Iterator[Arrived]:
    """Yield buckets on the engine's GPU, or in pinned host memory through two buffers on the GPU. The rendezvous is an
    NcclMeeting. The communicator is kept for the group's next push, unless this one fails."""
    meeting = NcclMeeting.from_json(reception.rendezvous)
    joined = _groups.join(meeting, reception)
    try:
        if not joined.group.is_open:
            joined.group.open(reception.deadline)
        yield from _broadcasts(joined, reception)
    except BaseException as error:
        _groups.drop(joined)
        if isinstance(error, RuntimeError):
            first_line = first_line_of(error)
            raise WeightPushFailed(f"the NCCL broadcast broke: {first_line}") from error
        raise


def _broadcasts(joined: _Joined, reception: Reception) -> Iterator[Arrived]:
    """Enqueue the broadcasts ahead, and yield each bucket when it has arrived."""
    group, deadline = joined.group, reception.deadline
    relay = None
    if not is_gpu(reception.device):
        relay = joined.relay_for(max(bucket.num_bytes for bucket in reception.manifest.buckets))
    enqueued: deque[tuple[torch.Tensor, tuple[int, ...]]] = deque()

    def oldest() -> Arrived:
        wire, events = enqueued.popleft()
        for event in events:
            group.wait(event, deadline)
        return Arrived(wire)

    for num_bytes in wire_sizes(reception.manifest):
        if len(enqueued) >= (MAX_ENQUEUED if relay is None else NUM_SLOTS):
            yield oldest()
        wire = reception.buffer(num_bytes, reception.device if relay is None else torch.device("cpu"))
        if relay is None:
            events: tuple[int, ...] = (group.broadcast(wire.data_ptr(), num_bytes, deadline, hold=wire),)
        else:
            events = relay.receive(wire.data_ptr(), num_bytes, deadline, hold=wire)
        enqueued.append((wire, events))
    # The barrier shows the publisher that this rank gets everything. It stays None if the group is broken: the waits
    # for the buckets find out whether one is missing.
    barrier = None
    with contextlib.suppress(WeightPushFailed):
        barrier = group.enter_barrier(deadline)
    while enqueued:
        yield oldest()
    try:
        if barrier is not None:
            group.wait(barrier, deadline)
            return
    except WeightPushFailed as error:  # not a failure of this rank, which has every bucket
        logger.warning("another member did not end the push: %s", error)
    _groups.drop(joined)  # so that the barrier does not occupy the GPU forever


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


class _JoinedGroups:
    """The groups that this process has joined: one per sender, and none of a learner with an outdated term."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._joined: list[_Joined] = []

    def join(self, meeting: NcclMeeting, reception: Reception) -> _Joined:
        term = reception.manifest.term
        with self._lock:
            of_sender = [j for j in self._joined if j.meeting.sender == meeting.sender]
            past = [j for j in self._joined if j.term < term or (j in of_sender and j.meeting.group != meeting.group)]
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


_groups = _JoinedGroups()
atexit.register(_groups.drop_all)


def is_gpu(device: torch.device) -> bool:
    """Whether buckets arrive in the device's own memory."""
    return device.type == "cuda"
