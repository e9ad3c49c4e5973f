"""The stage of a push: a background thread receives and hashes one version while the engine keeps serving.

A receiver knows nothing about engines. Each of its waits has a deadline and ends early when the stage is aborted. So if
a publisher stalls or never connects, it costs no more than a waiting thread. The receivers of nccl, shm and snapshot
are here, the others in receivers/.

For a low-rank adapter only the adapter itself is sent. The engine loads the merged weights, so it decodes as fast as it
does without an adapter.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import safe_open
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.errors import WeightPushFailed, first_line_of
from penstock.machine import accepts_connections
from penstock.v1 import weights_pb2
from penstock.weights.cuda import MAX_ENQUEUED, NUM_SLOTS, UNIQUE_ID, NcclGroup, NcclMeeting, Relay, device_mix64
from penstock.weights.delta import HEADER, parse_layout
from penstock.weights.folder_tensors import TIED_HEAD, tensor_shapes, weight_files
from penstock.weights.snapshot import read_snapshot
from penstock.weights.transports import (
    A_SUFFIX,
    B_SUFFIX,
    MIX64,
    SEALS,
    TRANSPORTS,
    Deadline,
    RunningChecksum,
    bucket_offsets,
    header_bytes,
    host_checksum,
    item_bytes,
    read_header,
    wire_sizes,
)

logger = logging.getLogger(__name__)
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
SPARE_DEVICE_BYTES = 512 * 2**20
"""GPU memory that a stage leaves free for the engine."""
HASH_PIECE_BYTES = 8 * 2**20
"""Size of the pieces in which a bucket is copied from the GPU and hashed."""
NUM_DELTA_HASHERS = 3
"""Threads that hash buckets that were sent as deltas. Whole buckets arrive no faster than one thread hashes them."""
CONNECT_RETRY_S = 0.05
STORE_POLL_S = 0.01
ITEMS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ITEMS = 2**22
"""Items that are written at once. It bounds the memory that decoding needs, which on a GPU is the engine's."""
Phase = Literal["receiving", "received", "failed"]
Tensors = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Reception:
    """One transfer, as one worker of a member sees it."""

    announcement: weights_pb2.AnnounceRequest
    device: torch.device
    """Where to put the buckets: the engine's GPU if a second set of weights fits there, else host memory."""
    deadline: Deadline
    groups: JoinedGroups
    """The NCCL groups of this worker."""
    worker: int = 0
    """Index of this worker within the member."""
    spare: list[torch.Tensor] = field(default_factory=list)
    """Buffers of an earlier version. Filling them again is faster than using new memory."""
    worker_device: torch.device = torch.device("cpu")
    """Where the engine keeps its weights. The receiving thread uses this device, with a separate stream."""

    @property
    def manifest(self) -> weights_pb2.WeightManifest:
        return self.announcement.manifest

    @property
    def rendezvous(self) -> str:
        """How to find the publisher. The sender of the same transport documents the format."""
        return self.announcement.rendezvous

    @property
    def rank(self) -> int:
        """Rank of this worker in the transfer; the publisher is rank 0."""
        return self.announcement.rank + self.worker

    def buffer(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return an uninitialised bucket. Host memory is pinned if there is a GPU to copy from or to."""
        for index, tensor in enumerate(self.spare):
            if tensor.numel() == num_bytes and tensor.device == device:
                return self.spare.pop(index)
        pin = device.type == "cpu" and torch.cuda.is_available()
        return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)


@dataclass(frozen=True)
class Arrived:
    """The bytes of one bucket, as they were sent."""

    wire: torch.Tensor
    """Flat uint8 of the size that the manifest gives for the transfer, on `Reception.device` or in host memory."""
    checksum: str = ""
    """Checksum of the bytes, if the receiver knows it: it hashed them on arrival, or the publisher's header has it."""
    is_shared: bool = False
    """The bytes are the publisher's own sealed pages. They need no second hash, and cannot be reused as a buffer."""


Receiver = Callable[[Reception], Iterator[Arrived]]
"""Yields the buckets in the manifest's order."""


class WeightStage:
    """Receives one version. Its phase goes from `receiving` to `received`, or to `failed` with one line in `failure`.

    The thread also decodes deltas, merges adapters and computes the checksums. A commit only compares the checksums and
    loads the tensors. `last` is the stage that the engine loaded last. When this stage starts, it takes the buffers of
    `last`: it applies a delta to them, or fills them again. So a server keeps one set of buckets. If a push fails, it
    has no base for a delta until it has loaded another version."""

    def __init__(
        self, announcement: weights_pb2.AnnounceRequest, model_folder: Path, *, worker: int = 0,
        device: torch.device | None = None, last: WeightStage | None = None, groups: JoinedGroups | None = None,
    ) -> None:  # fmt: skip
        self.manifest = announcement.manifest
        self.done: Future[None] = Future()
        """Resolved when the version was received or has failed."""
        self.phase: Phase = "receiving"
        self.failure = ""
        self.receive_s = 0.0
        self.buckets: list[torch.Tensor] = []
        self.announcement = announcement
        self._model_folder = model_folder
        self._worker = worker
        self._device = device or torch.device("cpu")
        self._last = last
        self._groups = groups or JoinedGroups()
        self._base_version: int | None = None
        """The version that the buffers of `last` had, if a delta can be applied to them."""
        self._taken: list[torch.Tensor] = []
        """The buffers of `last`."""
        self._buffers: list[torch.Tensor] = []
        """The buckets that are memory of this process, not pages of the publisher."""
        self._aborted = threading.Event()
        self._checksums: list[str] = []
        self._tensors: Tensors = []
        self._thread = threading.Thread(target=self._run, name=f"stage-{self.manifest.policy_version}", daemon=True)

    @property
    def kept_version(self) -> int | None:
        """This version if a delta can be sent on it: all its buckets are kept, and none is the publisher's."""
        is_kept = self.phase == "received" and self.manifest.retain and 0 < len(self.buckets) == len(self._buffers)
        return self.manifest.policy_version if is_kept else None

    def start(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._base_version = last.kept_version
            self._taken = last.release()
        self.done.set_running_or_notify_cancel()
        self._thread.start()

    def abort(self) -> None:
        """Tell the thread to end. Does not wait for it."""
        self._aborted.set()

    def mismatch(self, expected: Sequence[str]) -> str:
        """Return why the buckets differ from the expected checksums, or an empty string if they do not."""
        if len(expected) != len(self._checksums):
            return f"{len(self._checksums)} buckets were received, but the commit has {len(expected)} checksums"
        for index, (found, wanted) in enumerate(zip(self._checksums, expected, strict=True)):
            if found != wanted:
                return f"bucket {index} is corrupt: checksum {found}, expected {wanted}"
        return ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors to load, named as in the model folder. They are views into the buckets."""
        assert self.phase == "received"
        return iter(self._tensors)

    def release(self) -> list[torch.Tensor]:
        """Return the buffers, for a later stage to fill. Call it once the tensors are loaded and no longer needed."""
        buffers, self._buffers = self._buffers, []
        self.buckets, self._tensors = [], []
        return buffers

    def _run(self) -> None:
        started = time.monotonic()
        try:
            with alongside_engine(self._device):
                self._receive()
                self._tensors = list(named_tensors(self.manifest, self.buckets))
                if self.manifest.HasField("adapter"):
                    adapter, scale = dict(self._tensors), self.manifest.adapter.scale
                    self._tensors = merged_weights(self._model_folder, adapter, scale)
            self.receive_s = time.monotonic() - started
            self.phase = "received"
        except Exception as error:
            self.failure = (str(error) or repr(error)).splitlines()[0]
            self.phase = "failed"
        finally:
            self._taken = []
            self.done.set_result(None)

    def _receive(self) -> None:
        """Receive the buckets in order. Other threads hash each bucket while the next one arrives."""
        announcement, is_delta = self.announcement, self.manifest.HasField("base_version")
        if is_delta and self.manifest.base_version != self._base_version:
            raise WeightPushFailed(f"version {self.manifest.base_version}, the base of the delta, was not kept")
        base = list(self._taken)
        reception = Reception(
            announcement,
            device=base[0].device if is_delta else self._bucket_device(),
            deadline=Deadline(announcement.deadline_s, f"receiving weights by {announcement.transport}", self._aborted),
            groups=self._groups,
            worker=self._worker,
            spare=[
                buffer
                for index, buffer in enumerate(base)
                if not (is_delta and self.manifest.buckets[index].wire_bytes)
            ],
            worker_device=self._device,
        )
        num_hashers = NUM_DELTA_HASHERS if is_delta else 1
        with ThreadPoolExecutor(num_hashers, thread_name_prefix="hash") as hashing:
            sums = []
            for index, arrived in enumerate(find_receiver(announcement.transport)(reception)):
                if self.manifest.buckets[index].wire_bytes:
                    apply(base[index], arrived.wire, item_bytes(self.manifest))
                    self.buckets.append(base[index])
                else:
                    self.buckets.append(arrived.wire.to(reception.device))
                if not arrived.is_shared:
                    self._buffers.append(self.buckets[-1])
                sums.append(hashing.submit(bucket_checksum, self.manifest.checksum, self.buckets[-1], arrived.checksum))
            self._checksums = [future.result() for future in sums]

    def _bucket_device(self) -> torch.device:
        """Return the engine's device if a second set of weights fits into its free memory, else the host."""
        if self._device.type != "cuda":
            return torch.device("cpu")
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        # Memory that earlier stages left in torch's cache is available too.
        free_bytes += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        free_bytes += sum(buffer.numel() for buffer in self._taken if buffer.device == self._device)
        needed = sum(bucket.num_bytes for bucket in self.manifest.buckets) + SPARE_DEVICE_BYTES
        return self._device if free_bytes >= needed else torch.device("cpu")


@contextmanager
def alongside_engine(device: torch.device) -> Iterator[None]:
    """Make `device` current in this thread, with a stream that is independent of the engine's streams. On exit
    everything enqueued on the stream is done, so the engine's streams may read the results."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(_stage_stream(device)):
        yield
        torch.cuda.current_stream().synchronize()


_stage_stream = cache(torch.cuda.Stream)
"""One stream per device. torch caches memory by stream, so each stage can use the memory of the one before."""


def bucket_checksum(name: str, bucket: torch.Tensor, known: str = "") -> str:
    """Return the `known` checksum, or compute it: on the GPU if the bucket is there and the checksum is mix64, else
    from a host copy."""
    if known:
        return known
    if bucket.is_cuda and name == MIX64:
        return device_mix64(bucket.data_ptr(), bucket.numel(), bucket.get_device())
    return _checksum_by_pieces(name, bucket) if bucket.is_cuda else host_checksum(name, bucket.numpy())


def _checksum_by_pieces(name: str, bucket: torch.Tensor) -> str:
    """Hash a bucket on a GPU on the host, where the publisher hashed it. A pinned buffer makes the copy fast."""
    checksum = RunningChecksum(name)
    buffer = torch.empty(min(bucket.numel(), HASH_PIECE_BYTES), dtype=torch.uint8, pin_memory=True)
    with torch.cuda.device(bucket.device), torch.cuda.stream(_stage_stream(bucket.device)):
        for piece in bucket.split(HASH_PIECE_BYTES):
            copied = buffer[: piece.numel()]
            copied.copy_(piece)
            checksum.update(copied.numpy())
    return checksum.value


def named_tensors(
    manifest: weights_pb2.WeightManifest, buckets: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield views into the buckets, in the manifest's order. They are valid as long as the buckets are."""
    for spec in manifest.tensors:
        raw = buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        yield spec.name, raw.view(TORCH_DTYPES[spec.dtype]).reshape(tuple(spec.shape))


@dataclass(eq=False)
class _Joined:
    """A group, and this worker's rank in it."""

    meeting: NcclMeeting
    rank: int
    term: int
    group: NcclGroup
    relay: Relay | None = None

    def relay_for(self, max_bytes: int) -> Relay:
        if self.relay is None or self.relay.max_bytes < max_bytes:
            self.relay = Relay(self.group, max_bytes)
        return self.relay


class JoinedGroups:
    """The NCCL groups that one worker has joined: one per sender, and none of a learner with an outdated term. Those
    that are left when the process exits are aborted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.joined: list[_Joined] = []

    def join(self, meeting: NcclMeeting, reception: Reception) -> _Joined:
        term = reception.manifest.term
        with self._lock:
            of_sender = [j for j in self.joined if j.meeting.sender == meeting.sender]
            past = [j for j in self.joined if j.term < term or (j in of_sender and j.meeting.group != meeting.group)]
        for joined in past:
            self.drop(joined)
        found = [j for j in self.joined if (j.meeting.group, j.rank) == (meeting.group, reception.rank)]
        if found:
            return found[0]
        if meeting.kept:
            raise WeightPushFailed("this worker has left the NCCL group of the push; the publisher must form a new one")
        device_index = reception.worker_device.index or 0
        group = NcclGroup(reception.announcement.world_size, reception.rank, device_index)
        atexit.register(group.abort)
        joined = _Joined(meeting, reception.rank, term, group)
        with self._lock:
            self.joined.append(joined)
        return joined

    def drop(self, joined: _Joined) -> None:
        with self._lock:
            self.joined = [other for other in self.joined if other is not joined]
        atexit.unregister(joined.group.abort)
        joined.group.abort()


@dataclass(eq=False)
class StageSlot:
    """The stages of one worker: at most one new one, and the one loaded last. Beginning another aborts the new one. The
    worker's NCCL groups are kept from stage to stage."""

    model_folder: Path
    device: torch.device | None = None
    worker: int = 0
    loaded: WeightStage | None = None
    """The stage that the engine loaded last. The next stage uses it as `WeightStage.last`."""
    _stage: WeightStage | None = None
    _groups: JoinedGroups = field(default_factory=JoinedGroups)

    def begin(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self.abort()
        self._stage = WeightStage(
            announcement, self.model_folder, worker=self.worker, device=self.device, last=self.loaded,
            groups=self._groups,
        )  # fmt: skip
        self._stage.start()

    def staged(self, policy_version: int) -> WeightStage:
        """Return the stage of that version, which may still receive. Raises WeightPushFailed if there is none."""
        stage = self._stage
        if stage is None or stage.manifest.policy_version != policy_version:
            staged = stage.manifest.policy_version if stage else None
            raise WeightPushFailed(f"version {policy_version} is not staged; {staged} is")
        return stage

    def verified(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> WeightStage:
        """Wait for the stage of that version, compare its checksums and return it. Blocks meanwhile. Raises
        WeightPushFailed if the version is not staged, fails, does not arrive in time or has other checksums. The stage
        then leaves the slot, whether it is returned or not."""
        stage = self.staged(policy_version)
        wait([stage.done], timeout_s)
        has_arrived = stage.done.done()
        self._drop(stage)
        if not has_arrived:
            raise WeightPushFailed(f"version {policy_version} did not arrive within {timeout_s:g} s")
        if why := stage.failure or stage.mismatch(bucket_checksums):
            raise WeightPushFailed(why)
        return stage

    def take(self) -> WeightStage:
        """Return the stage, which the caller has verified, and empty the slot."""
        stage, self._stage = self._stage, None
        assert stage is not None and stage.phase == "received"
        return stage

    def abort(self) -> None:
        if self._stage is not None:
            self._drop(self._stage)

    def _drop(self, stage: WeightStage) -> None:
        """End the stage's thread. Empty the slot, unless another stage has taken its place."""
        stage.abort()
        if self._stage is stage:
            self._stage = None


def apply(bucket: torch.Tensor, wire: torch.Tensor, item_bytes: int) -> None:
    """Apply a delta (penstock/weights/delta.py) to a bucket in place. On a GPU the kernels run on the current stream,
    and are done at the return. Raises WeightPushFailed if `wire` is not a valid delta. It then never writes outside the
    bucket, but a part of the delta may have been applied."""
    layout = parse_layout(bytes(wire[: HEADER.size].tolist()), wire.numel(), item_bytes)
    wire = wire.to(bucket.device)
    items = bucket.view(ITEMS[item_bytes])
    gaps = wire[layout.gaps].view(ITEMS[layout.gap_bytes]).split(CHUNK_ITEMS)
    values = wire[layout.values].view(ITEMS[item_bytes]).split(CHUNK_ITEMS)
    last = torch.full((1,), -1, dtype=torch.int64, device=bucket.device)
    for gap, value in zip(gaps, values, strict=True):
        positions = (gap.long() & (2 ** (8 * layout.gap_bytes) - 1)).cumsum(0) + last
        first, last = positions[:1], positions[-1:]
        if len(positions) and not (int(first) >= 0 and int(last) < len(items)):
            raise WeightPushFailed("a delta points outside its bucket")
        items[positions] = value
    if bucket.is_cuda:
        torch.cuda.current_stream().synchronize()


def merged_weights(folder: Path, adapter: dict[str, torch.Tensor], scale: float) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a push of the whole model would have. A weight W that the adapter names becomes W + scale
    * lora_B @ lora_A, computed in float32."""
    merged: list[tuple[str, torch.Tensor]] = []
    names = tensor_shapes(folder).keys() | {TIED_HEAD}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in (name for name in file.keys() if name in names):  # noqa: SIM118  (not a dict)
                weight = file.get_tensor(name)
                if name + A_SUFFIX in adapter:
                    low, up = adapter[name + A_SUFFIX], adapter[name + B_SUFFIX]
                    product = scale * (up.float() @ low.float())
                    weight = (weight.to(product.device, torch.float32) + product).to(weight.dtype)
                merged.append((name, weight))
    return merged


def find_receiver(transport: str) -> Receiver:
    """Return the receiver of a transport. The ones in receivers/ are imported here."""
    if transport not in TRANSPORTS:
        raise WeightPushFailed(f"unknown transport {transport!r}; this server knows {', '.join(TRANSPORTS)}")
    own = _RECEIVERS.get(transport)
    return own or cast(Receiver, import_module(f"penstock_rollout.weights.receivers.{transport}").receive)


@cache
def device_uuid(device: torch.device) -> str:
    """Return the name by which publisher and servers refer to a worker's device: `cpu`, or the UUID of the GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def receive_by_shm(reception: Reception) -> Iterator[Arrived]:
    """shm: map the publisher's buckets. Nothing is copied, and the pages outlive the publisher. The rendezvous is a
    path under /proc."""
    sizes = wire_sizes(reception.manifest)
    offsets = bucket_offsets(sizes, mmap.PAGESIZE)
    path = Path(reception.rendezvous)
    if not str(path.absolute()).startswith("/proc/"):
        raise WeightPushFailed(f"{path} is not a path under /proc")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightPushFailed(
            f"{path} cannot be opened ({error.strerror}); shm needs the same host, user and pid namespace; or use gloo"
        ) from error
    try:
        _check_sealed(fd)
        num_bytes = offsets[-1] + header_bytes(len(sizes))
        if os.fstat(fd).st_size != num_bytes:
            raise WeightPushFailed(f"{reception.rendezvous} is not {num_bytes} bytes long, as the manifest requires")
        # Wait until the header says that the memory holds all of the announced version.
        size = header_bytes(len(sizes))
        while (checksums := read_header(os.pread(fd, size, offsets[-1]), reception.manifest)) is None:
            reception.deadline.sleep()
        # The mapping is private: if this process wrote to it by mistake, only its own copy would change.
        mapping = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for offset, size, checksum in zip(offsets, sizes, checksums, strict=False):
        yield Arrived(torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset), checksum, True)


def _check_sealed(fd: int) -> None:
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        is_sealed = False
    if not is_sealed:
        raise WeightPushFailed("the publisher's shared memory is not sealed, so other processes could change it")


def receive_by_snapshot(reception: Reception) -> Iterator[Arrived]:
    """snapshot: read the buckets from a safetensors file on a shared volume. The rendezvous is its folder."""
    folder = Path(reception.rendezvous)
    try:
        for bucket in read_snapshot(folder, reception.manifest):
            reception.deadline.check()
            yield Arrived(torch.from_numpy(bucket))
    except OSError as error:
        raise WeightPushFailed(f"reading the snapshot in {folder} failed: {error.strerror or error}") from error


def receive_by_nccl(reception: Reception) -> Iterator[Arrived]:
    """nccl: receive the publisher's broadcasts on a separate stream, while the engine decodes.

    Yields buckets on the engine's GPU, or in pinned host memory through two buffers on the GPU. The rendezvous is an
    NcclMeeting. The communicator is kept for the group's next push, unless this one fails."""
    meeting = NcclMeeting.from_json(reception.rendezvous)
    joined = reception.groups.join(meeting, reception)
    try:
        if not joined.group.is_open:
            joined.group.open(reception.deadline, lambda: _meet(meeting, reception))
        yield from _broadcasts(joined, reception)
    except BaseException as error:
        reception.groups.drop(joined)
        if isinstance(error, RuntimeError):
            raise WeightPushFailed(f"the NCCL broadcast broke: {first_line_of(error)}") from error
        raise


def _meet(meeting: NcclMeeting, reception: Reception) -> bytes:
    """Tell the publisher that this rank is ready to start NCCL, and wait for the unique id, which all ranks get."""
    store = PrefixStore(meeting.group, connect_store(meeting.host, meeting.port, reception.deadline))
    store.set(str(reception.rank), "")
    reception.deadline.wait_until(lambda: store.check([UNIQUE_ID]), STORE_POLL_S)
    return bytes.fromhex(store.get(UNIQUE_ID).decode())


def connect_store(host: str, port: int, deadline: Deadline) -> Any:
    """Connect to the publisher's store. TCPStore's own retries could not be aborted."""
    deadline.wait_until(lambda: accepts_connections(host, port, min(deadline.remaining_s, 1.0)), CONNECT_RETRY_S)
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=deadline.remaining_s))


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
            group.wait(barrier, deadline.half())  # the commit that follows has the same deadline
            return
    except WeightPushFailed as error:  # not a failure of this rank, which has every bucket
        logger.warning("another member did not end the push: %s", error)
    reception.groups.drop(joined)  # so that the barrier does not occupy the GPU forever


def is_gpu(device: torch.device) -> bool:
    """Whether buckets arrive in the device's own memory."""
    return device.type == "cuda"


_RECEIVERS: dict[str, Receiver] = {
    "nccl": receive_by_nccl,
    "shm": receive_by_shm,
    "snapshot": receive_by_snapshot,
}
