"""CUDA without torch, for both ends of a push: libraries, streams and memory, NCCL groups, CUDA IPC, checksums.

CuPy's bindings of the CUDA runtime, and NCCL, are loaded on first use. Tests replace them by stand-ins. CuPy's
communicators are blocking, and a blocking start cannot be aborted: its thread would wait for a missing rank forever. So
the calls of a weight push go to NCCL's C library itself, with `blocking = 0` in its public configuration. None of them
waits for another rank. Pointers, streams and events are plain integers.

`NcclGroup` is a communicator with deadlines. The publisher is rank 0; every worker of every member has a rank. NCCL
itself waits for its peers forever, so every wait polls with a Deadline. `abort` ends everything that still runs.

With CUDA IPC, one process maps GPU memory that another process on the same GPU has allocated:

    bucket | bucket | … | 16 bytes identity | 8 bytes number of ready buckets

Each bucket starts at a multiple of 512. The identity is a hash of run, term, version and sizes. It keeps a member from
taking one version for another, for example when the owner has freed the memory and the handle refers to new memory.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.transports import PUBLISHER_RANK, Deadline, Rendezvous, wire_sizes

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS, NOT_READY = 0, 7, 600
"""Result codes: of NCCL and CUDA, ncclInProgress and cudaErrorNotReady."""
_UINT8 = 1
_SUM = 0
_SONAME = "libnccl.so.2"


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as NCCL 2.14 defined it. Later versions accept it, and use their defaults for all other fields."""

    _fields_ = (("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int))


class NcclLibrary:
    """A communicator is a plain integer. One thread at a time may use it, but any thread may abort it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in {
            "ncclGetVersion": [POINTER(c_int)],
            "ncclGetUniqueId": [POINTER(_UniqueId)],
            "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
            "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
            "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
            "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
            "ncclCommAbort": [c_void_p],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p

    def version(self) -> str:
        """Return the version, such as 2.28.9."""
        code = c_int()
        self._check(self._library.ncclGetVersion(byref(code)))
        return f"{code.value // 10_000}.{code.value // 100 % 100}.{code.value % 100}"

    def unique_id(self) -> bytes:
        """Return the id by which the ranks of a new communicator find each other."""
        unique_id = _UniqueId()
        self._check(self._library.ncclGetUniqueId(byref(unique_id)))
        return bytes(unique_id.internal)

    def begin(self, num_ranks: int, unique_id: bytes, rank: int) -> int:
        """Begin to create a communicator on this thread's device. It is ready when `is_idle` returns True."""
        communicator = c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21_400, blocking=0)
        result = self._library.ncclCommInitRankConfig(byref(communicator), num_ranks, given, rank, byref(config))
        self._check(result)
        return communicator.value or 0

    def is_idle(self, communicator: int) -> bool:
        """Return whether all calls have returned; their work on a stream may go on. Raises asynchronous errors."""
        result = c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, byref(result)))
        self._check(result.value)
        return result.value == SUCCESS

    def broadcast(self, communicator: int, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        """Enqueue a broadcast in place. The call may go on in the background until `is_idle` returns True."""
        self._check(self._library.ncclBroadcast(pointer, pointer, num_bytes, _UINT8, root, communicator, stream))

    def all_reduce(self, communicator: int, pointer: int, num_bytes: int, stream: int) -> None:
        """Enqueue a sum of bytes in place, which ends on no rank before every rank has begun it."""
        self._check(self._library.ncclAllReduce(pointer, pointer, num_bytes, _UINT8, _SUM, communicator, stream))

    def abort(self, communicator: int) -> None:
        """End everything that the communicator does, and free it. Call it once."""
        self._library.ncclCommAbort(communicator)

    def _check(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise WeightPushFailed(f"NCCL failed: {text} (result {result})")


@cache
def nccl() -> NcclLibrary:
    """Load NCCL: the library of the Python package, which torch uses too, or else the system's."""
    try:
        return NcclLibrary(ctypes.CDLL(_path_in_package() or _SONAME))
    except (OSError, AttributeError) as error:
        raise WeightPushFailed(
            f"NCCL cannot be loaded ({error}); install nvidia-nccl-cu13, or set weights.transport to gloo"
        ) from error


def _path_in_package() -> str:
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    folders = package.submodule_search_locations if package else None
    paths = [Path(folder) / "lib" / _SONAME for folder in folders or []]
    return next((str(path) for path in paths if path.exists()), "")


def runtime() -> Any:
    try:
        from cupy.cuda import runtime as found
    except ImportError as error:
        advice = "install cupy-cuda13x, or set weights.transport to gloo"
        raise WeightPushFailed(f"CuPy cannot be imported ({error}); {advice}") from error
    return found


def nccl_version() -> str:
    """The version of NCCL, or an empty string if it cannot be loaded."""
    try:
        return nccl().version()
    except WeightPushFailed:
        return ""


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
ABORT_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.01

_T = TypeVar("_T")


@dataclass(frozen=True)
class NcclMeeting(Rendezvous):
    """The rendezvous of nccl."""

    sender: str
    """Id of the sender, which has one group at a time."""
    group: str
    unique_id: str
    """NCCL's unique id, in hex."""
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

    def __init__(self, unique_id: bytes, world_size: int, rank: int, device_index: int) -> None:
        self.device_index = device_index
        self._unique_id = unique_id
        self._world_size = world_size
        self._rank = rank
        self._nccl = nccl()
        self._communicator = 0
        self._is_made = False
        self._thread: threading.Thread | None = None
        """Begins the communicator and aborts it. An abort as the interpreter ends could not start a thread."""
        self._is_ending = threading.Event()
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

    def open(self, deadline: Deadline) -> None:
        """Create the communicator together with all other ranks."""
        self._stream = DeviceStream(self.device_index)
        self._copies = DeviceStream(self.device_index)
        self._token = DeviceAllocation(1, self.device_index)
        failures: list[Exception] = []
        has_begun = threading.Event()

        def begin_and_abort() -> None:
            try:
                runtime().setDevice(self.device_index)
                self._communicator = self._nccl.begin(self._world_size, self._unique_id, self._rank)
            except Exception as error:
                failures.append(error)
            has_begun.set()
            self._is_ending.wait()
            self._abort()

        # In a thread, because the first call of a process looks for networks, which can take long.
        thread = threading.Thread(target=begin_and_abort, name="nccl-group", daemon=True)
        with self._lock:  # an abort finds either no thread or one that it can wait for
            thread.start()
            self._thread = thread
        deadline.wait_until(has_begun.is_set, POLL_S)
        if failures:
            raise failures[0]
        deadline.wait_until(self._has_returned, POLL_S)
        self._is_made = True

    def broadcast(self, pointer: int, num_bytes: int, deadline: Deadline, hold: object = None) -> int:
        """Enqueue one in-place broadcast from the publisher. Returns the event of its end, for `wait`.

        `hold` owns the memory. The group keeps a reference as long as NCCL may access it."""
        stream = self._stream.handle
        self._guarded(lambda: self._nccl.broadcast(self._communicator, pointer, num_bytes, PUBLISHER_RANK, stream))
        deadline.wait_until(self._has_returned, POLL_S)
        event = self._guarded(self._stream.record)
        self._held[event] = hold
        return event

    def enter_barrier(self, deadline: Deadline) -> int:
        """Enqueue a barrier after the broadcasts. Every rank has to enter it. Returns the event of its end, for `wait`.

        Until it ends, it occupies the GPU, and whoever synchronizes the device waits for it."""
        token, stream = self._token, self._stream.handle
        assert token is not None, "a barrier follows open"
        self._guarded(lambda: self._nccl.all_reduce(self._communicator, token.pointer, token.num_bytes, stream))
        deadline.wait_until(self._has_returned, POLL_S)
        return self._guarded(self._stream.record)

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
        self._stream.wait(event, deadline, self._has_returned)
        self._held.pop(event, None)

    def abort(self) -> None:
        """Abort the communicator. Its work on the GPU ends soon. Never waits for other ranks."""
        with self._lock:
            was_aborted, self._is_aborted = self._is_aborted, True
        if was_aborted or self._thread is None:
            return
        # In a thread, because NCCL's abort can hang. The thread keeps the memory until NCCL has finished with it.
        self._is_ending.set()
        self._thread.join(ABORT_TIMEOUT_S)

    def _abort(self) -> None:
        if self._communicator:
            self._nccl.abort(self._communicator)
        while not (self._stream.is_drained() and self._copies.is_drained()):
            time.sleep(DRAIN_POLL_S)
        self._held.clear()
        self._token = None
        self._stream.close()
        self._copies.close()

    def _has_returned(self) -> bool:
        """Return whether all calls have returned; their work on the stream may go on. Raises asynchronous errors."""
        return self._guarded(lambda: self._nccl.is_idle(self._communicator))

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """Make a call that does not block, unless the group is aborted."""
        with self._lock:
            if self._is_aborted:
                raise WeightPushFailed("the NCCL group was aborted")
            return call()


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
