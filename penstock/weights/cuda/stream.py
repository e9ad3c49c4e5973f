"""CUDA streams and allocations that are independent of torch. Pointers, streams and events are plain integers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from penstock.errors import WeightPushFailed
from penstock.weights.cuda import libraries
from penstock.weights.transports import Deadline

SUCCESS, NOT_READY = 0, 600
POLL_S = 0.0002
SPIN_S = 0.002
"""How long a wait spins before it sleeps. Even the shortest sleep costs a tenth of the time to copy a gigabyte."""


class DeviceStream:
    """A stream that does not wait for the default stream, so its copies run during training or decoding.

    Its waits poll, because a wait inside CUDA has no deadline."""

    def __init__(self, device_index: int) -> None:
        self.device_index = device_index
        self._runtime = libraries.runtime()
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
        self._runtime = libraries.runtime()
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
