"""nccl: broadcast each bucket from GPU to GPU, on a separate stream."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.errors import WeightPushFailed, first_line_of
from penstock.weights.cuda import libraries
from penstock.weights.cuda.nccl_group import MAX_ENQUEUED, NUM_SLOTS, NcclGroup, NcclMeeting, Relay
from penstock.weights.deadline import Deadline
from penstock_learner.weights.memory import device_index
from penstock_learner.weights.push import PushTarget, num_ranks
from penstock_learner.weights.senders.sender import Shipment


class NcclSender:
    """Keeps its communicator from push to push while the members stay the same. The rendezvous is an NcclMeeting.

    Deltas, and buckets in host memory, are sent through two buffers on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device_index = device_index(device)
        self._name = uuid.uuid4().hex
        self._group: NcclGroup | None = None
        self._relay: Relay | None = None
        self._members: tuple[PushTarget, ...] = ()
        self._meeting = NcclMeeting(self._name, "", "", kept=False, version="")

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        if self._group is not None and self._group.is_open and self._members == tuple(members):
            return replace(self._meeting, kept=True).to_json()
        self._drop()
        nccl = libraries.nccl()
        unique_id = nccl.unique_id()
        self._meeting = NcclMeeting(self._name, uuid.uuid4().hex, unique_id.hex(), kept=False, version=nccl.version())
        self._group = NcclGroup(unique_id, num_ranks(members), 0, self._device_index)
        self._members = tuple(members)
        return self._meeting.to_json()

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        assert self._group is not None, "send follows open"
        try:
            if not self._group.is_open:
                self._group.open(deadline)
            self._send(self._group, shipment, deadline)
        except RuntimeError as error:
            first_line = first_line_of(error)
            raise WeightPushFailed(f"the NCCL broadcast broke: {first_line}") from error

    def _send(self, group: NcclGroup, shipment: Shipment, deadline: Deadline) -> None:
        enqueued: deque[int] = deque()
        for wire in shipment.wires(deadline):
            direct = is_on_gpu(wire)
            while len(enqueued) >= (MAX_ENQUEUED if direct else NUM_SLOTS):
                group.wait(enqueued.popleft(), deadline)
            pointer, num_bytes = wire.data_ptr(), wire.numel()
            if direct:
                enqueued.append(group.broadcast(pointer, num_bytes, deadline, hold=wire))
            else:
                enqueued.append(self._relay_of(group, shipment).send(pointer, num_bytes, deadline))
        while enqueued:
            group.wait(enqueued.popleft(), deadline)
        group.wait_for_barrier(deadline)  # a member that fails in its commit must not cut off another one

    def close(self, *, failed: bool) -> None:
        if failed:
            self._drop()

    def _drop(self) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = self._relay = None

    def _relay_of(self, group: NcclGroup, shipment: Shipment) -> Relay:
        max_bytes = max(bucket.num_bytes for bucket in shipment.manifest.buckets)
        if self._relay is None or self._relay.max_bytes < max_bytes:
            self._relay = Relay(group, max_bytes)
        return self._relay


def is_on_gpu(wire: torch.Tensor) -> bool:
    return wire.is_cuda
