"""CUDA streams and allocations of our own, beside those of torch. Pointers, streams and events are plain integers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from penstock.errors import WeightPushFailed
from penstock.weights.cuda import libraries
from penstock.weights.deadline import Deadline

SUCCESS, NOT_READY = 0, 600
POLL_S = 0.0002
SPIN_S = 0.002
"""Waits are spun this long before they sleep: even a sleep of nothing costs a tenth of what copying a gigabyte does."""


class DeviceStream:
    """A stream that does not wait for the default one, so that its copies run beside training or decoding.

    Its waits poll, because a wait inside CUDA has no deadline."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self._runtime = libraries.runtime()
        self._runtime.setDevice(device_index)
        self.handle = int(self._runtime.streamCreateWithFlags(self._runtime.streamNonBlocking))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Enqueue a copy between any two of device and host memory."""
        self._runtime.memcpyAsync(target, source, num_bytes, self._runtime.memcpyDefault, self.handle)

    def record(self) -> int:
        """An event behind everything enqueued so far; `wait` disposes of it."""
        event = int(self._runtime.eventCreateWithFlags(self._runtime.eventDisableTiming))
        self._runtime.eventRecord(event, self.handle)
        return event

    def follow(self, event: int) -> None:
        """What is enqueued from now on starts after the event, of whichever stream."""
        self._runtime.streamWaitEvent(self.handle, event)

    def wait(self, event: int, deadline: Deadline, check: Callable[[], object] = lambda: None) -> None:
        """Until the event has happened. `check` is called at every poll and may raise."""

        def happened() -> bool:
            if _is_done(self._runtime.eventQuery(event), "an event"):
                return True
            check()
            return False

        spin_until = time.monotonic() + SPIN_S
        while not happened():  # CuPy lets other threads of this interpreter run while it asks
            if time.monotonic() > spin_until:
                deadline.wait_until(happened, POLL_S)
                break
        self._runtime.eventDestroy(event)

    def is_drained(self) -> bool:
        return _is_done(self._runtime.streamQuery(self.handle), "a stream")

    def synchronize(self) -> None:
        """Without a deadline: for streams whose work waits for nobody else."""
        self._runtime.streamSynchronize(self.handle)

    def close(self) -> None:
        self._runtime.streamDestroy(self.handle)


class DeviceAllocation:
    """One cudaMalloc: of no allocator's pool, so that its IPC handle covers exactly these bytes. Zeroed; freed with the
    object."""

    def __init__(self, num_bytes: int, device_index: int) -> None:
        self.num_bytes = num_bytes
        self.device_index = device_index
        self._runtime = libraries.runtime()
        self._runtime.setDevice(device_index)
        self.pointer = 0
        self.pointer = int(self._runtime.malloc(max(num_bytes, 1)))
        self.clear()

    def clear(self) -> None:
        """Zero it, on a stream of its own: the default one may wait for a transfer that hangs."""
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
