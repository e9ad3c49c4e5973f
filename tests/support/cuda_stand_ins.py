"""Stand-ins for `cupy.cuda.runtime` and `cupy.cuda.nccl` in host memory, and the choice between them and a GPU's."""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from penstock.weights import cuda
from penstock.weights.cuda import NOT_READY, SUCCESS
from penstock.weights.transports import Deadline
from penstock_learner.weights import senders as sending
from penstock_rollout.weights import stage as receiving
from penstock_rollout.weights import stage as stage_module
from penstock_rollout.weights.receivers.gloo import InterruptibleStore, break_connections


class _Stream:
    """A thread that executes the enqueued operations."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._num_left = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def enqueue(self, work: Callable[[], None] | None) -> None:
        with self._changed:
            self._num_left += 1
        self._work.put(work)

    def is_idle(self) -> bool:
        return self._num_left == 0

    def synchronize(self) -> None:
        with self._changed:
            self._changed.wait_for(self.is_idle)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            with self._changed:
                self._num_left -= 1
                self._changed.notify_all()


class RuntimeStandIn:
    """Stands in for `cupy.cuda.runtime`. It has the functions that Penstock calls."""

    streamNonBlocking = 1  # noqa: N815
    eventDisableTiming = 2  # noqa: N815
    memcpyDefault = 4  # noqa: N815

    def __init__(self) -> None:
        self.allocations: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.num_mapped = 0
        self.num_maps = 0
        self._numbers = itertools.count(1)
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, threading.Event] = {}

    def setDevice(self, device: int) -> None:  # noqa: N802
        assert device == 0

    def malloc(self, size: int) -> int:
        memory = ctypes.create_string_buffer(size + 512)
        pointer = -(-ctypes.addressof(memory) // 512) * 512
        self.allocations[pointer] = memory
        return pointer

    def free(self, ptr: int) -> None:
        del self.allocations[ptr]

    def memsetAsync(self, ptr: int, value: int, size: int, stream: int) -> None:  # noqa: N802
        self.enqueue(stream, lambda: ctypes.memset(ptr, value, size))

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:  # noqa: N802
        assert kind == self.memcpyDefault
        self.enqueue(stream, lambda: ctypes.memmove(dst, src, size))

    def streamCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        assert flags == self.streamNonBlocking, "the default stream waits for everything"
        number = next(self._numbers)
        self._streams[number] = _Stream()
        return number

    def streamDestroy(self, stream: int) -> None:  # noqa: N802
        self._streams.pop(stream).enqueue(None)

    def streamSynchronize(self, stream: int) -> None:  # noqa: N802
        self._streams[stream].synchronize()

    def streamQuery(self, stream: int) -> int:  # noqa: N802
        return SUCCESS if self._streams[stream].is_idle() else NOT_READY

    def streamWaitEvent(self, stream: int, event: int, flags: int = 0) -> None:  # noqa: N802
        happened = self._events[event]
        self.enqueue(stream, lambda: None if happened.wait() else None)

    def eventCreateWithFlags(self, flags: int) -> int:  # noqa: N802
        number = next(self._numbers)
        self._events[number] = threading.Event()
        return number

    def eventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        self.enqueue(stream, self._events[event].set)

    def eventQuery(self, event: int) -> int:  # noqa: N802
        return SUCCESS if self._events[event].is_set() else NOT_READY

    def eventDestroy(self, event: int) -> None:  # noqa: N802
        del self._events[event]

    def ipcGetMemHandle(self, devPtr: int) -> bytes:  # noqa: N802, N803
        assert devPtr in self.allocations, "only the start of an allocation has a handle"
        return devPtr.to_bytes(64, "little")

    def ipcOpenMemHandle(self, handle: bytes, flags: int = 1) -> int:  # noqa: N802
        pointer = int.from_bytes(handle, "little")
        if pointer not in self.allocations:
            raise RuntimeError("cudaErrorInvalidResourceHandle: invalid resource handle")
        self.num_mapped += 1
        self.num_maps += 1
        return pointer

    def ipcCloseMemHandle(self, devPtr: int) -> None:  # noqa: N802, N803
        self.num_mapped -= 1

    def enqueue(self, stream: int, work: Callable[[], object]) -> None:
        self._streams[stream].enqueue(lambda: (work(), None)[1])


FOR_EVER = timedelta(minutes=2)
"""Longer than the deadline of any test. Gloo's destructor may wait this long for a broadcast that nobody ended."""
POLL_S = 0.001
UNIQUE_ID_BYTES = 128


class NcclError(RuntimeError):
    """Stands in for the error of `cupy.cuda.nccl`."""


class NcclStandIn:
    """Stands in for `cupy.cuda.nccl`. It has what Penstock uses. As with CuPy, communicators are blocking: their start
    ends when every rank has come, and nothing else ends it. Counts communicators (`num_inits`) and aborts
    (`num_aborts`)."""

    available = True
    NCCL_UINT8, NCCL_SUM = 1, 0

    def __init__(self, runtime: RuntimeStandIn, version: int = 22809) -> None:
        self.runtime = runtime
        self.num_inits = 0
        self.num_aborts = 0
        self.silent_ranks: set[int] = set()
        """Ranks that take part in the start, but not in broadcasts."""
        self.is_stopped = threading.Event()
        self.communicators: set[NcclCommunicatorStandIn] = set()
        self.NcclCommunicator = type("NcclCommunicator", (NcclCommunicatorStandIn,), {"nccl": self})
        self._version = version
        self._stores: list[Any] = []

    @property
    def num_communicators(self) -> int:
        """Number of communicators that were not aborted."""
        return len(self.communicators)

    def get_version(self) -> int:
        return self._version

    def get_unique_id(self) -> bytes:
        store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False, timeout=FOR_EVER)
        self._stores.append(store)
        return f"127.0.0.1:{store.port}".encode().ljust(UNIQUE_ID_BYTES, b"\0")

    def stop(self) -> None:
        """End the calls that a test left waiting. Gloo crashes if the interpreter exits while its threads run."""
        self.is_stopped.set()
        for communicator in list(self.communicators):
            communicator.end()


class NcclCommunicatorStandIn:
    """Stands in for `cupy.cuda.nccl.NcclCommunicator`, as an attribute of a NcclStandIn."""

    nccl: NcclStandIn

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
        assert len(commId) == UNIQUE_ID_BYTES
        self._rank = rank
        self._aborted = threading.Event()
        self._failure = ""
        self._is_starting = True
        self._group: Any = None
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="send")
        """Sends what is in the root's buffer."""
        self.nccl.num_inits += 1
        self.nccl.communicators.add(self)
        self._start(ndev, commId)

    def check_async_error(self) -> None:
        if self._failure:
            raise NcclError(f"NCCL_ERROR_REMOTE_ERROR: {self._failure}")

    def bcast(self, buff: int, count: int, datatype: int, root: int, stream: int) -> None:
        assert datatype == self.nccl.NCCL_UINT8
        tensor = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(buff)))
        self.nccl.runtime.enqueue(stream, lambda: self._broadcast(tensor, root))

    def allReduce(  # noqa: N802
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None:
        assert (sendbuf, datatype, op) == (recvbuf, self.nccl.NCCL_UINT8, self.nccl.NCCL_SUM)
        # After everything in the root's buffer. Gloo's barrier waits for all ranks to begin it.
        self.nccl.runtime.enqueue(stream, lambda: self._sending.submit(self._run, self._group.barrier).result())

    def abort(self) -> None:
        assert not self._is_starting, "NCCL frees what a blocking start still uses"
        self.nccl.num_aborts += 1
        self.nccl.communicators.discard(self)
        self.end()

    def end(self) -> None:
        self._aborted.set()

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Run on the stream."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        if self._rank == root:
            buffer = tensor.clone()
            self._sending.submit(self._run, self._group.broadcast, [buffer], options)
        else:
            self._run(self._group.broadcast, [tensor], options)

    def _run(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Run an operation of gloo. A GPU's kernel would spin here too."""
        if self._rank in self.nccl.silent_ranks:
            self._aborted.wait()
        if self._aborted.is_set():
            return
        try:
            self._wait_for(operation(*arguments))
        except RuntimeError:
            self._fail()

    def _wait_for(self, work: Any) -> None:
        """Wait for gloo, or for the abort."""
        while not work.is_completed():
            if self._aborted.wait(POLL_S):
                break_connections(self._group, [work])
                return
        work.wait()

    def _start(self, num_ranks: int, unique_id: bytes) -> None:
        try:
            host, _, port = unique_id.rstrip(b"\0").decode().partition(":")
            inner = TCPStore(host, int(port), None, is_master=False, timeout=timedelta(seconds=10))
            deadline = Deadline(FOR_EVER.total_seconds(), "the start of a communicator", self.nccl.is_stopped)
            store = InterruptibleStore(PrefixStore("nccl", inner), deadline)
            self._group = ProcessGroupGloo(store, self._rank, num_ranks, FOR_EVER)
        except Exception as error:
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error") from error
        finally:
            self._is_starting = False

    def _fail(self) -> None:
        """Show an asynchronous error, and hang until the abort."""
        self._failure = "remote process exited or there was a network error"
        self._aborted.wait()


@dataclass(frozen=True)
class NcclBinding:
    """The binding of one process. `install` it before anything else there."""

    is_real: bool = False
    in_place: bool = False
    """Broadcast buckets where they are, as between GPUs. Otherwise both ends stage in host memory."""
    version: str = ""
    """The version of NCCL to report instead of the true one."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_real else torch.device("cpu")

    def install(self) -> NcclStandIn | None:
        """Replace NCCL by the stand-in, or let this process be a rank beside others on the same GPU."""
        stand_in = None
        if self.is_real:
            # NCCL refuses two ranks on one GPU of one host. So each process says that it is a host of its own.
            os.environ["NCCL_HOSTID"] = f"pid-{os.getpid()}"
            os.environ["NCCL_SOCKET_IFNAME"] = "lo"
            os.environ["NCCL_IB_DISABLE"] = "1"
            cuda.runtime()  # imports CuPy, which takes seconds, before a deadline runs
            if not self.in_place:
                stage_module.SPARE_DEVICE_BYTES = 2**60
        else:
            stand_in = install_nccl_stand_in()
            if self.in_place:
                sending.is_on_gpu = lambda wire: True
                receiving.is_gpu = lambda device: True
        if self.version:
            cuda.nccl_version = lambda: self.version
        return stand_in


def install_nccl_stand_in() -> NcclStandIn:
    """Replace NCCL in this process by gloo, with pointers to host memory."""
    runtime = RuntimeStandIn()
    nccl = NcclStandIn(runtime)
    cuda.runtime = lambda: runtime
    cuda.nccl = lambda: nccl
    return nccl
