"""A stand-in for `cupy.cuda.runtime` on the host: the same calls, with parallel streams and events.

Memory is host memory, so pointers of torch's CPU tensors are device pointers too. IPC works inside one process.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable

from penstock.weights.cuda.stream import NOT_READY, SUCCESS


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
