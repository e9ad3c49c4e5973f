"""CUDA without torch, for both ends of a push: libraries, streams and memory, NCCL groups, CUDA IPC, checksums.

CuPy's bindings of the CUDA runtime and of NCCL are imported on first use. Tests replace them by stand-ins. Pointers,
streams and events are plain integers.

`NcclGroup` is a communicator of CuPy with deadlines. The publisher is rank 0; every worker of every member has a rank.
CuPy's communicators are blocking, and NCCL waits for its peers forever:

| what                | waits for            | how the wait ends                                                     |
|---------------------|----------------------|-----------------------------------------------------------------------|
| the start           | every rank           | all ranks meet over a store; if one dies later, it is left behind     |
| bcast and allReduce | at first, every rank | `open` makes the first of each; later calls only enqueue work         |
| work on the GPU     | every rank           | waits poll its event, NCCL's errors and a Deadline; `abort` ends it   |

The thread of a group makes these calls, so a caller waits no longer than its deadline. NCCL has no safe abort of a
blocking start. A start that is left behind keeps its memory and a thread, which polls at idle priority, until the
missing rank comes, and is aborted then. If that rank is dead, they stay until this process ends.

With CUDA IPC, one process maps GPU memory that another process on the same GPU has allocated:

    bucket | bucket | … | 16 bytes identity | 8 bytes number of ready buckets

Each bucket starts at a multiple of 512. The identity is a hash of run, term, version and sizes. It keeps a member from
taking one version for another, for example when the owner has freed the memory and the handle refers to new memory.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import xxhash

from penstock.errors import WeightPushFailed, first_line_of
from penstock.v1 import weights_pb2
from penstock.weights.transports import PUBLISHER_RANK, Deadline, Rendezvous, wire_sizes

logger = logging.getLogger(__name__)
SUCCESS, NOT_READY = 0, 600
"""Result codes of CUDA: cudaSuccess and cudaErrorNotReady."""


def runtime() -> Any:
    """Return the module `cupy.cuda.runtime`."""
    return _imported("cupy.cuda").runtime


def nccl() -> Any:
    """Return the module `cupy.cuda.nccl`. It loads the library of the Python package, which torch uses too."""
    found = _imported("cupy.cuda.nccl")
    if not found.available:
        raise WeightPushFailed("CuPy cannot load NCCL; install nvidia-nccl-cu13, or set weights.transport to gloo")
    return found


def _imported(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        advice = "install cupy-cuda13x, or set weights.transport to gloo"
        raise WeightPushFailed(f"CuPy cannot be imported ({error}); {advice}") from error


def nccl_version() -> str:
    """The version of NCCL, such as 2.28.9, or an empty string if it cannot be loaded."""
    try:
        code = nccl().get_version()
    except WeightPushFailed:
        return ""
    return f"{code // 10_000}.{code // 100 % 100}.{code % 100}"


# ── streams and memory ──

POLL_S = 0.0002
SPIN_S = 0.002
"""How long a wait spins before it sleeps. Even the shortest sleep costs a tenth of the time to copy a gigabyte."""


class DeviceStream:
    """A stream that does not wait for the default stream, so its copies run during training or decoding.

    Its waits poll, because a wait inside CUDA has no deadline."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self._runtime = runtime()
        self._runtime.setDevice(device_index)
        self.handle = int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy. Source and target may each be device or host memory."""
        self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyDefault, self.handle)

    def record(self) -> int:
        """Return an event that happens after everything enqueued so far. `wait` destroys it."""
        event = int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
        self._runtime.eventRecord(event, self.handle)
        return event

    def follow(self, event: int) -> None:
        """Make everything that is enqueued from now on start after the event, which may be of another stream."""
        self._runtime.streamWaitEvent(self.handle, event)

    def wait(self, event: int, deadline: Deadline, check: Callable[[], object] = lambda: None) -> None:
        """Wait until the event has happened. `check` is called at every poll and may raise."""

        def happened() -> bool:
            if _is_done(self._runtime.eventQuery(event), "an event"):
                return True
            check()
            return False

        spin_until = time.monotonic() + SPIN_S
        while not happened():  # CuPy releases the GIL in eventQuery
            if time.monotonic() > spin_until:
                deadline.wait_until(happened, POLL_S)
                break
        self._runtime.eventDestroy(event)

    def is_drained(self) -> bool:
        return _is_done(self._runtime.streamQuery(self.handle), "a stream")

    def synchronize(self) -> None:
        """Wait without a deadline. Only for streams whose work does not depend on another process."""
        self._runtime.streamSynchronize(self.handle)

    def close(self) -> None:
        self._runtime.streamDestroy(self.handle)


class DeviceAllocation:
    """Zeroed GPU memory from cudaMalloc, freed with this object.

    It does not come from an allocator's pool, so its IPC handle covers exactly these bytes."""

    def __init__(self, num_bytes: int, device_index: int) -> None:
        self.num_bytes = num_bytes
        self.device_index = device_index
        self._runtime = runtime()
        self._runtime.setDevice(device_index)
        self.pointer = 0
        self.pointer = int(self._runtime.malloc(max(num_bytes, 1)))
        self.clear()

    def clear(self) -> None:
        """Zero the memory, on a separate stream: the default stream may wait for a transfer that hangs."""
        stream = DeviceStream(self.device_index)
        self._runtime.memsetAsync(self.pointer, 0, self.num_bytes, stream.handle)
        stream.synchronize()
        stream.close()

    def __del__(self) -> None:
        if getattr(self, "pointer", 0) and not sys.is_finalizing():
            self._runtime.free(self.pointer)


def _is_done(status: int, what: str) -> bool:
    if status not in (SUCCESS, NOT_READY):
        raise WeightPushFailed(f"the GPU reports error {status} for {what} of a weight transfer; restart this process")
    return status == SUCCESS


# ── NCCL groups ──

MAX_ENQUEUED = 32
"""Upper bound on enqueued broadcasts that are not known to be done. CUDA's queue must not fill up: it would block."""
ABORT_TIMEOUT_S, START_ABORT_TIMEOUT_S = 5.0, 1.0
"""How long an abort waits for the calls that still run: NCCL's abort can hang, and a start waits for every rank."""
DRAIN_POLL_S = 0.01
UNIQUE_ID = "unique_id"
"""The key of the store with the id by which the ranks of NCCL find each other, in hex."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class NcclMeeting(Rendezvous):
    """The rendezvous of nccl."""

    sender: str
    """Id of the sender, which has one group at a time."""
    group: str
    host: str
    port: int
    """The publisher's store, where the ranks meet before they start NCCL."""
    kept: bool
    """The group exists already. A worker that has left it fails the push."""
    version: str
    """The publisher's version of NCCL. Ranks with different versions may hang."""

    def check_version(self, own: str) -> None:
        """Raise WeightPushFailed if this process has another version of NCCL than the publisher."""
        if own != self.version:
            raise WeightPushFailed(version_mismatch(self.version, own))


def version_mismatch(publisher: str, server: str) -> str:
    """The error of different versions of NCCL. An empty version means that there is none."""
    return (
        f"the learner has NCCL {publisher or '(none)'} and the rollout server {server or '(none)'}; "
        "install the same nvidia-nccl-cu13 in both"
    )


class NcclGroup:
    """Call `open` first, then `broadcast`, `wait` and the barrier as often as needed, and `abort` at the end.

    One thread uses the group, but any thread may abort it. It is not usable after a failure."""

    def __init__(self, world_size: int, rank: int, device_index: int) -> None:
        self.device_index = device_index
        self._world_size = world_size
        self._rank = rank
        self._nccl = nccl()
        self._communicator: Any = None
        self._is_made = False
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        """Makes every call that could block, and the abort. An abort as the interpreter ends could start no thread."""
        self._held: dict[int, object] = {}
        self._lock = threading.Lock()
        self._is_aborted = False
        self._stream: DeviceStream
        self._copies: DeviceStream
        self._token: DeviceAllocation | None = None
        """The byte that a barrier sums up."""

    @property
    def is_open(self) -> bool:
        return self._is_made and not self._is_aborted

    def open(self, deadline: Deadline, meet: Callable[[], bytes]) -> None:
        """Create the communicator together with all other ranks. `meet` returns NCCL's unique id as soon as every rank
        is ready to start. It ends at the deadline."""
        self._stream = DeviceStream(self.device_index)
        self._copies = DeviceStream(self.device_index)
        self._token = DeviceAllocation(1, self.device_index)
        with self._lock:  # an abort finds either no thread or one that it can tell to end
            self._thread = threading.Thread(target=self._run, name="nccl-group", daemon=True)
            self._thread.start()
        unique_id = self._call(meet, deadline)
        self._call(lambda: self._start(unique_id), deadline)
        # NCCL connects the ranks in the first call of each kind. No work may be on the GPU while that can hang.
        self.wait(self.broadcast(self._token.pointer, self._token.num_bytes, deadline), deadline)
        self.wait_for_barrier(deadline)
        self._is_made = True

    def broadcast(self, pointer: int, num_bytes: int, deadline: Deadline, hold: object = None) -> int:
        """Enqueue one in-place broadcast from the publisher. Returns the event of its end, for `wait`.

        `hold` owns the memory. The group keeps a reference as long as NCCL may access it."""

        def call() -> int:
            kind, stream = self._nccl.NCCL_UINT8, self._stream.handle
            self._communicator.bcast(pointer, num_bytes, kind, PUBLISHER_RANK, stream)
            event = self._stream.record()
            self._held[event] = hold
            return event

        return self._call(call, deadline)

    def enter_barrier(self, deadline: Deadline) -> int:
        """Enqueue a barrier after the broadcasts. Every rank has to enter it. Returns the event of its end, for `wait`.

        Until it ends, it occupies the GPU, and whoever synchronizes the device waits for it."""
        token = self._token
        assert token is not None, "a barrier follows open"

        def call() -> int:
            kind, stream = self._nccl.NCCL_UINT8, self._stream.handle
            pointer, operation = token.pointer, self._nccl.NCCL_SUM
            self._communicator.allReduce(pointer, pointer, token.num_bytes, kind, operation, stream)
            return self._stream.record()

        return self._call(call, deadline)

    def wait_for_barrier(self, deadline: Deadline) -> None:
        """Enter the barrier and wait for it. Every rank has received all broadcasts then.

        The end of a broadcast says less: it may have ended here while one rank still passes it on to the next."""
        self.wait(self.enter_barrier(deadline), deadline)

    def copy(self, target: int, source: int, num_bytes: int, *, after: int | None = None) -> int:
        """Enqueue a copy that runs in parallel to broadcasts, or after the event `after`. Returns its event."""

        def call() -> int:
            if after is not None:
                self._copies.follow(after)
            self._copies.copy(target, source, num_bytes)
            return self._copies.record()

        return self._guarded(call)

    def wait(self, event: int, deadline: Deadline) -> None:
        """Wait until the event has happened. NCCL does not access the memory any more then."""

        def check() -> None:
            self._communicator.check_async_error()

        self._stream.wait(event, deadline, lambda: self._guarded(check))
        self._held.pop(event, None)

    def abort(self) -> None:
        """Abort the communicator. Its work on the GPU ends soon. Never waits for other ranks."""
        with self._lock:
            was_aborted, self._is_aborted = self._is_aborted, True
        if was_aborted or self._thread is None:
            return
        self._calls.put(None)
        self._thread.join(ABORT_TIMEOUT_S if self._is_made else START_ABORT_TIMEOUT_S)
        if self._thread.is_alive() and (thread_id := self._thread.native_id):
            logger.warning("a call of NCCL does not return; it is left behind in its thread")
            with suppress(OSError):  # it polls its sockets without a pause
                os.sched_setscheduler(thread_id, os.SCHED_IDLE, os.sched_param(0))

    def _run(self) -> None:
        runtime().setDevice(self.device_index)
        while (call := self._calls.get()) is not None:
            call()
        if self._communicator is not None:
            self._communicator.abort()
        while not (self._stream.is_drained() and self._copies.is_drained()):
            time.sleep(DRAIN_POLL_S)
        self._held.clear()  # only now: an abort that hangs must keep the memory
        self._communicator = self._token = None
        self._stream.close()
        self._copies.close()

    def _start(self, unique_id: bytes) -> None:
        # Not one call: CuPy would destroy a communicator that fails to start, but NCCL wants that to be aborted.
        kind = self._nccl.NcclCommunicator
        self._communicator = kind.__new__(kind)
        self._communicator.__init__(self._world_size, unique_id, self._rank)

    def _call(self, call: Callable[[], _T], deadline: Deadline) -> _T:
        """Make a call in the group's thread. If it has not returned at the deadline, it is left behind there."""
        result: Future[_T] = Future()

        def run() -> None:
            try:
                result.set_result(call())
            except Exception as error:
                result.set_exception(error)

        self._guarded(lambda: self._calls.put(run))
        deadline.wait_until(lambda: self._guarded(result.done), POLL_S)
        return self._guarded(result.result)

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """Make a call that does not block, unless the group is aborted. Raises WeightPushFailed if CuPy raises."""
        with self._lock:
            if self._is_aborted:
                raise WeightPushFailed("the NCCL group was aborted")
            try:
                return call()
            except RuntimeError as error:
                raise WeightPushFailed(f"the NCCL group broke: {first_line_of(error)}") from error
            except KeyError as error:  # CuPy's table of results lacks ncclInProgress
                advice = "unset NCCL_COMM_BLOCKING, because CuPy's communicators are blocking"
                raise WeightPushFailed(f"NCCL answered {error}; {advice}") from error


NUM_SLOTS = 2


class Relay:
    """Broadcasts from or to host memory by way of two GPU buffers: one is copied while the other is broadcast.

    Lives as long as its group. Before each bucket the caller must wait for the one that came NUM_SLOTS earlier."""

    def __init__(self, group: NcclGroup, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._group = group
        self._slots = [DeviceAllocation(max_bytes, group.device_index) for _ in range(NUM_SLOTS)]
        self._num_used = 0

    def send(self, pointer: int, num_bytes: int, deadline: Deadline) -> int:
        """Copy to the GPU, then enqueue the broadcast. Returns its event. Earlier broadcasts run meanwhile."""
        slot = self._next_slot()
        self._group.wait(self._group.copy(slot.pointer, pointer, num_bytes), deadline)
        return self._group.broadcast(slot.pointer, num_bytes, deadline, hold=slot)

    def receive(self, pointer: int, num_bytes: int, deadline: Deadline, hold: object) -> tuple[int, int]:
        """Enqueue the broadcast, then the copy to pinned memory that `hold` owns. Returns the events of
        the copy and of the broadcast, to be waited for in this order."""
        slot = self._next_slot()
        arrived = self._group.broadcast(slot.pointer, num_bytes, deadline, hold=(slot, hold))
        return self._group.copy(pointer, slot.pointer, num_bytes, after=arrived), arrived

    def _next_slot(self) -> DeviceAllocation:
        slot = self._slots[self._num_used % NUM_SLOTS]
        self._num_used += 1
        return slot


# ── CUDA IPC ──

BUCKET_ALIGNMENT = 512
IPC_HEADER = struct.Struct("<16sq")
MAX_KEPT = 2
"""Maximum number of unused mappings. Two, because a publisher fills one set of buckets while it pushes another."""


@dataclass(frozen=True)
class IpcOffer(Rendezvous):
    """The rendezvous of cuda_ipc."""

    handle: str
    """The IPC handle, in hex."""
    device: str
    """UUID of the GPU."""
    num_bytes: int
    """Size of the buckets with their alignment, which is the offset of the header."""
    num_ready: int
    """Number of buckets that were ready when the offer was made. The header decides."""


def identity(manifest: weights_pb2.WeightManifest) -> bytes:
    """Return the identity of a version for the header."""
    hashed = [manifest.run, manifest.term, manifest.policy_version, wire_sizes(manifest)]
    return xxhash.xxh3_128_digest(json.dumps(hashed).encode())


class Mappings:
    """Maps publishers' allocations into this process and keeps the mappings, because mapping costs ten times a copy.

    A publisher reuses its memory, so the same few handles come back. At most MAX_KEPT unused mappings are kept, and
    none of an earlier term: the memory of a dead publisher is released when the next one pushes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mapped: dict[bytes, _Mapping] = {}

    @contextmanager
    def opened(self, handle: bytes, device_index: int, term: int) -> Iterator[int]:
        """Map another process's allocation. Yields its address in this process."""
        mapping = self._take(handle, device_index, term)
        try:
            yield mapping.pointer
        except BaseException:
            mapping.is_trusted = False
            raise
        finally:
            with self._lock:
                mapping.num_users -= 1
                self._trim(term)

    def close(self) -> None:
        """Close all unused mappings."""
        with self._lock:
            for mapping in self._mapped.values():
                mapping.is_trusted = False
            self._trim(0)

    def _take(self, handle: bytes, device_index: int, term: int) -> _Mapping:
        with self._lock:
            self._trim(term)
            mapping = self._mapped.pop(handle, None) or _Mapping(_open(handle, device_index), term)
            mapping.num_users += 1
            self._mapped[handle] = mapping  # the newest is last
            return mapping

    def _trim(self, term: int) -> None:
        idle = [(handle, mapping) for handle, mapping in self._mapped.items() if not mapping.num_users]
        kept = [mapping for _, mapping in idle if mapping.is_trusted and mapping.term >= term][-MAX_KEPT:]
        for handle, mapping in idle:
            if mapping not in kept:
                del self._mapped[handle]
                runtime().ipcCloseMemHandle(mapping.pointer)


@dataclass(eq=False)
class _Mapping:
    pointer: int
    term: int
    num_users: int = 0
    is_trusted: bool = True


def _open(handle: bytes, device_index: int) -> int:
    cuda = runtime()
    cuda.setDevice(device_index)
    try:
        return int(cuda.ipcOpenMemHandle(handle))
    except (RuntimeError, ValueError) as error:
        raise WeightPushFailed(
            f"the publisher's GPU memory cannot be mapped ({error}); cuda_ipc needs a running publisher on this host"
        ) from error


# ── mix64 of bytes in GPU memory, in one pass ──

LOAD_BYTES = 16
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
KERNEL = "penstock_mix64"
SOURCE = r"""
__device__ __forceinline__ unsigned long long splitmix64(unsigned long long x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

extern "C" __global__ void penstock_mix64(
    const ulonglong2* __restrict__ pairs, unsigned long long num_pairs, unsigned long long* __restrict__ total
) {
    const unsigned long long golden = 0x9E3779B97F4A7C15ULL;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned long long step = 2 * stride * golden;
    unsigned long long salt = (2 * first + 1) * golden;
    unsigned long long sum = 0;
    #pragma unroll 4
    for (unsigned long long i = first; i < num_pairs; i += stride) {
        const ulonglong2 pair = pairs[i];
        sum += splitmix64(pair.x + salt) + splitmix64(pair.y + salt + golden);
        salt += step;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, offset);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(total, sum);
    }
}
"""


def device_mix64(pointer: int, num_bytes: int, device_index: int) -> str:
    """Return the checksum as 16 hex digits. The bytes must be complete. Runs on its own stream and waits for it."""
    if num_bytes % LOAD_BYTES or pointer % LOAD_BYTES:
        raise WeightPushFailed(f"mix64 on a GPU takes multiples of {LOAD_BYTES} bytes, not {num_bytes} at {pointer}")
    return f"{_hasher(device_index).run(pointer, num_bytes):016x}"


class _Hasher:
    """The compiled kernel of one device, with its stream and the memory of its result."""

    def __init__(self, device_index: int) -> None:
        import cupy

        self._device = cupy.cuda.Device(device_index)
        self._lock = threading.Lock()
        with self._device:
            self._max_blocks = self._device.attributes["MultiProcessorCount"] * _BLOCKS_PER_MULTIPROCESSOR
            self._kernel = cupy.RawKernel(SOURCE, KERNEL)
            self._stream = cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                self._total = cupy.zeros(1, dtype=np.uint64)

    def run(self, pointer: int, num_bytes: int) -> int:
        num_pairs = num_bytes // LOAD_BYTES
        num_blocks = max(1, min(-(-num_pairs // _THREADS), self._max_blocks))
        arguments = (np.uint64(pointer), np.uint64(num_pairs), self._total)
        with self._lock, self._device, self._stream:
            self._total.fill(0)
            self._kernel((num_blocks,), (_THREADS,), arguments)
            total: Any = self._total.get(stream=self._stream)
        return int(total[0])


@cache
def _hasher(device_index: int) -> _Hasher:
    return _Hasher(device_index)
