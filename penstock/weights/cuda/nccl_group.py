"""An NCCL communicator with deadlines. The publisher is rank 0; every worker of every member has a rank.

NCCL itself waits for its peers forever. So its communicators are non-blocking, and every wait polls with a Deadline.
`abort` ends everything that still runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from penstock.errors import WeightPushFailed
from penstock.weights.cuda import libraries
from penstock.weights.cuda.stream import POLL_S, DeviceAllocation, DeviceStream
from penstock.weights.transports import PUBLISHER_RANK, Deadline, Rendezvous

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
        self._nccl = libraries.nccl()
        self._communicator = 0
        self._is_made = False
        self._starting: threading.Thread | None = None
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

        def begin() -> None:
            try:
                libraries.runtime().setDevice(self.device_index)
                self._communicator = self._nccl.begin(self._world_size, self._unique_id, self._rank)
            except Exception as error:
                failures.append(error)

        # In a thread, because the first call of a process looks for networks, which can take long.
        thread = threading.Thread(target=begin, name="nccl-begin", daemon=True)
        with self._lock:  # an abort finds either no thread or one that it can wait for
            thread.start()
            self._starting = thread
        deadline.wait_until(lambda: not thread.is_alive(), POLL_S)
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
            has_started = self._starting is not None
        if was_aborted or not has_started:
            return
        # In a thread, because NCCL's abort can hang. The thread keeps the memory until NCCL has finished with it.
        thread = threading.Thread(target=self._abort, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT_S)

    def _abort(self) -> None:
        libraries.runtime().setDevice(self.device_index)
        assert self._starting is not None
        self._starting.join()  # no thread may abort a communicator that another one is still creating
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
