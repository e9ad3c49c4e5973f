"""The interface of a sender, the bytes that it sends, and the servers that it sends them to."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import BarrierOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo

from penstock.errors import Unavailable, WeightPushFailed, first_line_of
from penstock.v1 import weights_pb2
from penstock.weights import cuda
from penstock.weights.cuda import (
    MAX_ENQUEUED,
    NUM_SLOTS,
    UNIQUE_ID,
    DeviceStream,
    IpcOffer,
    NcclGroup,
    NcclMeeting,
    Relay,
    version_mismatch,
)
from penstock.weights.snapshot import write_snapshot
from penstock.weights.transports import (
    GLOO_PIECE_BYTES,
    GLOO_PIECES_AT_ONCE,
    PUBLISHER_RANK,
    Deadline,
    GroupPlace,
    group_places,
    is_divided,
    wire_sizes,
)
from penstock_learner.rendezvous import open_store
from penstock_learner.weights.staging import (
    DeviceBuckets,
    MemoryKind,
    SharedBuckets,
    StagedVersion,
    device_uuid,
)


@dataclass(frozen=True)
class Shipment:
    """The bytes to send: for each bucket either the staged bucket itself or a delta on another version."""

    manifest: weights_pb2.WeightManifest
    staged: StagedVersion
    deltas: tuple[torch.Tensor | None, ...] = ()

    def wires(self, deadline: Deadline) -> Iterator[torch.Tensor]:
        """Yield the bytes of each bucket in order, as soon as it is staged. They may be on the host or on a GPU."""
        for index in range(len(self.manifest.buckets)):
            delta = self.deltas[index] if self.deltas else None
            yield self.staged.bucket(index, deadline) if delta is None else delta


class Sender(Protocol):
    """Serves one push at a time: open, send, close. It lives as long as the publisher, and may keep its connections
    while the members stay the same. Every wait in `send` ends at the deadline. After a failure the next `open` starts
    from scratch."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        """Prepare to connect to the members' workers, whose ranks are 1, 2, … in order. Returns the rendezvous. It must
        not enter a collective, because members learn the rendezvous only afterwards."""

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Send every bucket to every worker. Raises WeightPushFailed if the transfer breaks."""

    def close(self, *, failed: bool) -> None:
        """End the push. If it failed, drop everything that a dead or late member could still block."""


class ShmSender:
    """The rendezvous is a path under /proc. Members map that memory when it is sealed."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        memory = shipment.staged.memory
        if not isinstance(memory, SharedBuckets):
            raise WeightPushFailed(f"shm needs buckets in shared memory, not {memory.kind}; unset weights.staging")
        return memory.path

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Wait until the buckets are sealed. The members then map them without further help."""
        shipment.staged.wait_sealed(deadline)

    def close(self, *, failed: bool) -> None:
        pass


@dataclass(eq=False)
class SnapshotSender:
    """The rendezvous is the folder. The folder is removed after the push, unless the run keeps it as a snapshot."""

    folder: Path
    kept: dict[int, Path]
    """Folders of the snapshots that the run keeps, by version."""
    model_path: Path
    _own: Path | None = None

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        staged = shipment.staged
        kept = self.kept.get(staged.policy_version)
        if kept is not None and kept.is_dir():
            return str(kept.resolve())
        self._own = self.folder / f"version-{staged.policy_version:08d}"
        write_snapshot_folder(staged, self.model_path, self._own, deadline)
        return str(self._own.resolve())

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Do nothing: the members read the file."""

    def close(self, *, failed: bool) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
               "merges.txt", "special_tokens_map.json", "chat_template.jinja")  # fmt: skip


def write_snapshot_folder(staged: StagedVersion, model_path: Path, folder: Path, deadline: Deadline) -> None:
    """Write the weights, once they are complete, and copy the small files of the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        if (source := model_path / name).is_file():
            shutil.copyfile(source, folder / name)  # without its mode
    checksums = staged.checksums(deadline)
    write_snapshot(folder, staged.manifest, [bucket.cpu().numpy() for bucket in staged.memory.buckets], checksums)


@dataclass(frozen=True)
class PublisherPlace:
    """The facts about the publisher by which `auto` chooses."""

    host_id: str
    device: str
    """`cpu`, or its GPU's UUID."""
    memory: MemoryKind
    has_cupy: bool
    nccl_version: str = ""
    """Version of the publisher's NCCL library. Empty if it has none."""


def choose_transport(place: PublisherPlace, members: Sequence[PushTarget]) -> tuple[str, str]:
    devices = [device for member in members for device in member.devices]

    def all_can(transport: str) -> bool:
        return all(transport in member.transports for member in members)

    if place.has_cupy and place.device != "cpu":
        if all_can("cuda_ipc") and set(devices) == {place.device} and place.memory == "device":
            return "cuda_ipc", "every worker shares the publisher's GPU"
        are_distinct = len({*devices, place.device, "cpu"}) == len(devices) + 2
        has_same_nccl = place.nccl_version != "" and all(m.nccl_version == place.nccl_version for m in members)
        if all_can("nccl") and are_distinct and has_same_nccl:
            return "nccl", "publisher and workers have one GPU each"
    if place.memory == "shared" and all_can("shm") and all(m.host_id == place.host_id for m in members):
        return "shm", "every member is on the publisher's host"
    others = {member.nccl_version for member in members if member.nccl_version} - {place.nccl_version}
    if place.nccl_version and others:
        return "gloo", version_mismatch(place.nccl_version, ", ".join(sorted(others)))
    return "gloo", "members are on several hosts, or lack what a faster transport needs"


def why_unable(transport: str, member: PushTarget) -> str:
    """Return why the member cannot receive by the transport, or an empty string if it can."""
    if transport not in member.transports:
        return f"it cannot receive by {transport}; set weights.transport to auto, or install what the transport needs"
    if transport == "nccl" and (own := cuda.nccl_version()) != member.nccl_version:
        return version_mismatch(own, member.nccl_version)
    return ""


def make_sender(transport: str, host: str, device: torch.device, gloo_group_size: int) -> Sender:
    if transport == "nccl":
        return NcclSender(host, device)
    if transport == "cuda_ipc":
        return CudaIpcSender(device)
    if transport == "shm":
        return ShmSender()
    if transport == "gloo":
        return GlooSender(host, gloo_group_size)
    raise WeightPushFailed(f"unknown transport {transport!r}")


class CudaIpcSender:
    """The rendezvous is an IpcOffer. Members copy a bucket when the header in the memory says that it is ready. Deltas,
    and buckets that are not staged on the GPU, are first copied to GPU memory of this sender, which is kept: freeing it
    would wait for everything that runs on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: DeviceBuckets | None = None
        self._own: DeviceBuckets | None = None
        self._is_ready = False
        """Every bucket was ready when the version was offered."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        staged = shipment.staged.memory
        try:
            if isinstance(staged, DeviceBuckets) and not shipment.deltas:
                self._memory = staged
            else:
                self._memory = self._own_memory(wire_sizes(shipment.manifest))
            self._is_ready = self._memory is staged and shipment.staged.is_sealed
            num_ready = len(staged.buckets) if self._is_ready else 0
            pointer, uuid = self._memory.allocation.pointer, device_uuid(self._memory.device)
            handle = cuda.runtime().ipcGetMemHandle(pointer)
            return IpcOffer(handle.hex(), uuid, self._memory.offsets[-1], num_ready).to_json()
        except RuntimeError as error:
            raise WeightPushFailed(f"GPU memory cannot be offered by cuda_ipc: {first_line_of(error)}") from error

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Return when every bucket is ready. The members copy without further help, and are done when they commit."""
        memory = self._memory
        assert memory is not None, "send follows open"
        if self._is_ready:
            return
        is_own = memory is self._own
        with closing(DeviceStream(memory.device.index)) as stream:
            for index, wire in enumerate(shipment.wires(deadline)):
                if is_own:
                    stream.copy(memory.buckets[index].data_ptr(), wire.data_ptr(), wire.numel())
                    stream.wait(stream.record(), deadline)
                is_last = index + 1 == len(shipment.manifest.buckets)
                if is_last or not shipment.staged.is_complete:
                    memory.mark_ready(shipment.manifest, index + 1)

    def close(self, *, failed: bool) -> None:
        self._memory = None

    def _own_memory(self, sizes: list[int]) -> DeviceBuckets:
        if self._own is not None and self._own.sizes == sizes:
            self._own.clear()
        else:
            self._own = None  # free the old memory first
            self._own = DeviceBuckets(sizes, self._device)
        return self._own


class NcclSender:
    """Keeps its communicator from push to push while the members stay the same. The rendezvous is an NcclMeeting.
    Deltas, and buckets in host memory, are sent through two buffers on the GPU."""

    def __init__(self, host: str, device: torch.device) -> None:
        self._host = host
        self._device_index = device.index or 0
        self._name = uuid.uuid4().hex
        self._group: NcclGroup | None = None
        self._store: Any = None
        """Where the workers of a new group meet. If they fail to, it stays until the next meeting: torch prints a stack
        trace in a worker that still waits there."""
        self._relay: Relay | None = None
        self._members: tuple[PushTarget, ...] = ()
        self._meeting = NcclMeeting(self._name, "", "", 0, kept=False, version="")

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        if self._group is not None and self._group.is_open and self._members == tuple(members):
            return replace(self._meeting, kept=True).to_json()
        self._drop()
        self._group = NcclGroup(num_ranks(members), PUBLISHER_RANK, self._device_index)
        self._store = _open_store(self._host, members, deadline)
        group, port, version = uuid.uuid4().hex, self._store.port, cuda.nccl_version()
        self._meeting = NcclMeeting(self._name, group, self._host, port, kept=False, version=version)
        self._members = tuple(members)
        return self._meeting.to_json()

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        assert self._group is not None, "send follows open"
        try:
            if not self._group.is_open:
                store = PrefixStore(self._meeting.group, self._store)
                self._group.open(deadline, lambda: _gather(store, num_ranks(members), deadline))
                self._store = None
            self._send(self._group, shipment, deadline)
        except RuntimeError as error:
            raise WeightPushFailed(f"the NCCL broadcast broke: {first_line_of(error)}") from error

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


def _gather(store: Any, num_ranks: int, deadline: Deadline) -> bytes:
    """Wait until every worker is ready to start NCCL. Then give all of them the unique id, and return it."""
    ranks = [str(rank) for rank in range(1, num_ranks)]
    deadline.wait_until(lambda: store.check(ranks))
    unique_id: bytes = cuda.nccl().get_unique_id()
    store.set(UNIQUE_ID, unique_id.hex())
    return unique_id


def is_on_gpu(wire: torch.Tensor) -> bool:
    return wire.is_cuda


@dataclass(eq=False)
class GlooSender:
    """Forms one group per push, or groups of `group_size` workers if there are more (penstock.weights.transports). The
    rendezvous is `host:port/prefix/group_size` of the store where all groups meet."""

    host: str
    group_size: int
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _store: Any = None
    _prefix: str = ""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        self._store = _open_store(self.host, members, deadline)
        self._prefix = f"push-{next(self._numbers)}"
        return f"{self.host}:{self._store.port}/{self._prefix}/{self.group_size}"

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Send to all workers, or to the relays. With relays it ends when all workers have all bytes: one that dies
        late would take those with it that get their bytes from it. Every operation gets the rest of the deadline, also
        because a group's destructor waits for sends that were begun."""
        try:
            [place] = group_places(PUBLISHER_RANK, num_ranks(members), self.group_size)
            store = PrefixStore(f"{self._prefix}/{place.name}", self._store)
            group = _rendezvous(store, place, self.host, deadline)
            in_flight: deque[Any] = deque()
            for wire in shipment.wires(deadline):
                for piece in wire.cpu().split(GLOO_PIECE_BYTES):
                    in_flight.append(_broadcast(group, piece, deadline))
                    if len(in_flight) == GLOO_PIECES_AT_ONCE:
                        in_flight.popleft().wait(_rest(deadline))
            if is_divided(num_ranks(members), self.group_size):
                options = BarrierOptions()
                options.timeout = _rest(deadline)
                in_flight.append(group.barrier(options))
            for work in in_flight:
                work.wait(_rest(deadline))
        except RuntimeError as error:
            raise WeightPushFailed(f"the broadcast broke: {first_line_of(error)}") from error

    def close(self, *, failed: bool) -> None:
        self._store = None


def _open_store(host: str, members: Sequence[PushTarget], deadline: Deadline) -> Any:
    try:
        return open_store(host, num_ranks(members), _rest(deadline))
    except Unavailable as error:
        raise WeightPushFailed(f"{error}; check learner.publish_host") from error


def _rendezvous(store: Any, place: GroupPlace, host: str, deadline: Deadline) -> Any:
    """Form the group. Raises WeightPushFailed at the deadline. Gloo gives each worker the whole time to connect, one
    after the other. So a separate thread meets, and is left behind at the deadline. It ends when a worker no longer
    connects."""
    met: Future[Any] = Future()

    def meet() -> None:
        try:
            met.set_result(ProcessGroupGloo(store, place.rank, place.num_ranks, _options(host, deadline.remaining_s)))
        except RuntimeError as error:
            met.set_exception(error)

    threading.Thread(target=meet, name="gloo-meeting", daemon=True).start()
    try:
        return met.result(deadline.remaining_s)
    except TimeoutError as error:
        deadline.check()
        raise WeightPushFailed("the workers did not meet in time") from error


def _broadcast(group: Any, piece: torch.Tensor, deadline: Deadline) -> Any:
    options = BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = PUBLISHER_RANK, 0, _rest(deadline)
    return group.broadcast([piece], options)


def _rest(deadline: Deadline) -> timedelta:
    return timedelta(seconds=deadline.remaining_s)


def _options(host: str, timeout_s: float) -> Any:
    """The options of a group whose connections are accepted on `host` only. There is a thread for each operation, so
    that none waits for another before its time begins to count."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = GLOO_PIECES_AT_ONCE
    return options


@dataclass(frozen=True)
class PushTarget:
    """A rollout server that takes part in a push. Equal in every push to the same server, whatever its state and load:
    a sender keeps its connections while the members are equal."""

    server_id: str
    address: str
    devices: tuple[str, ...] = ("cpu",)
    """The device of each worker's weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Two processes with the same host id can map each other's memory."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """Transports by which it can receive."""
    nccl_version: str = ""
    """Version of its NCCL library. Empty if it cannot receive by `nccl`."""


def num_ranks(members: Sequence[PushTarget]) -> int:
    return 1 + sum(len(member.devices) for member in members)


@dataclass
class PushReport:
    """The outcome of pushing one version to a set of servers."""

    policy_version: int
    transport: str = ""
    weights_digest: str = ""
    committed: list[str] = field(default_factory=list)
    """Servers that now serve the version."""
    failed: dict[str, str] = field(default_factory=dict)
    """Servers to evict, each with the reason."""
    superseded: list[str] = field(default_factory=list)
    """Servers that were skipped, because the push had to start again and a newer version was staged. None committed."""
    nonfinite: str = ""
    """Name of a tensor that is not finite. In this case no server has committed the version."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each phase: encode (if a delta was tried), announce, transfer and commit at the publisher; receive,
    load and pause of the slowest member."""
    num_bytes: int = 0
    """Bytes sent to each worker, times the number of workers that committed."""
    running_requests: int = 0
    """Requests, over all members, that were running while the version flipped."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started
