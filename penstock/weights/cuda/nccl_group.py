"""One NCCL communicator with deadlines: the publisher is rank 0, every worker of every member one more.

NCCL waits for its peers for ever. So its calls are made non-blocking where CuPy can say so, or else in a thread of
their own, and every wait polls under a Deadline. `abort` ends whatever is still going on.
"""

from __future__ import annotations

import ctypes
import json
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from penstock.errors import WeightPushFailed
from penstock.weights.cuda import libraries
from penstock.weights.cuda.stream import POLL_S, DeviceStream
from penstock.weights.deadline import Deadline
from penstock.weights.transports import PUBLISHER_RANK

MAX_ENQUEUED = 32
"""Broadcasts that run ahead of what is known to be done. A full queue of CUDA's would wait without a deadline."""
ABORT_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.01
IN_PROGRESS = 7
"""ncclInProgress."""
_CONFIG_MAGIC = struct.pack("<I", 0xCAFEBEEF)
_UNDEFINED = -(2**31)

_T = TypeVar("_T")


@dataclass(frozen=True)
class NcclMeeting:
    """The rendezvous of nccl."""

    sender: str
    """Which sender of which learner; it has one group at a time."""
    group: str
    unique_id: str
    """NCCL's, as hex."""
    kept: bool
    """The group exists already: everyone has it, or the push fails."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> NcclMeeting:
        try:
            said = json.loads(text)
            return NcclMeeting(str(said["sender"]), str(said["group"]), str(said["unique_id"]), bool(said["kept"]))
        except (ValueError, KeyError, TypeError) as error:
            raise WeightPushFailed(f"the rendezvous of nccl cannot be read: {error!r}") from error


class NcclGroup:
    """open → broadcast, wait, … → abort. Used by one thread, but aborted by any. Not usable after a failure."""

    def __init__(self, unique_id: bytes, world_size: int, rank: int, device_index: int) -> None:
        self.device_index = device_index
        self._unique_id = unique_id
        self._world_size = world_size
        self._rank = rank
        self._nccl = libraries.nccl()
        self._config = nonblocking_config(self._nccl)
        self._communicator: Any = None
        self._is_made = False
        self._calling: threading.Thread | None = None
        self._held: dict[int, object] = {}
        self._lock = threading.Lock()
        self._is_aborted = False
        self._stream: DeviceStream
        self._copies: DeviceStream

    @property
    def is_open(self) -> bool:
        return self._is_made and not self._is_aborted

    def open(self, deadline: Deadline) -> None:
        """Meet all other ranks."""
        self._stream = DeviceStream(self.device_index)
        self._copies = DeviceStream(self.device_index)
        # __init__ apart from __new__: a non-blocking one raises "in progress", and the object must outlive that.
        kind = self._nccl.NcclCommunicator
        communicator = self._communicator = kind.__new__(kind)
        arguments = [self._world_size, self._unique_id, self._rank]
        if self._config is not None:
            arguments.append(self._config)
        self._beside(lambda: communicator.__init__(*arguments), deadline)
        deadline.wait_until(self._is_settled, POLL_S)
        self._is_made = True

    def broadcast(self, pointer: int, num_bytes: int, deadline: Deadline, hold: object = None) -> int:
        """Enqueue one broadcast, in place, from the publisher; returns the event of its end, for `wait`.

        `hold` owns the memory, and is kept as long as NCCL may touch it."""

        def call() -> None:
            stream = self._stream.handle
            self._communicator.bcast(pointer, num_bytes, self._nccl.NCCL_UINT8, PUBLISHER_RANK, stream)

        if self._config is None:
            self._beside(call, deadline)
        else:
            self._guarded(lambda: _is_finished(call))
        deadline.wait_until(self._is_settled, POLL_S)
        event = self._guarded(self._stream.record)
        self._held[event] = hold
        return event

    def copy(self, target: int, source: int, num_bytes: int, *, after: int | None = None) -> int:
        """Enqueue a copy that runs beside broadcasts, or after one of them; returns its event, for `wait`."""

        def call() -> int:
            if after is not None:
                self._copies.follow(after)
            self._copies.copy(target, source, num_bytes)
            return self._copies.record()

        return self._guarded(call)

    def wait(self, event: int, deadline: Deadline) -> None:
        """Until the event has happened; then its memory is the caller's alone again."""
        self._stream.wait(event, deadline, self._is_settled)
        self._held.pop(event, None)

    def abort(self) -> None:
        """Give up the communicator; what it still does on the GPU ends soon. Never waits for other ranks."""
        with self._lock:
            was_aborted, self._is_aborted = self._is_aborted, True
        if was_aborted or self._communicator is None:
            return
        # A thread: NCCL's own abort has been seen to hang. It holds the memory until NCCL is off it.
        thread = threading.Thread(target=self._abort, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT_S)

    def _abort(self) -> None:
        libraries.runtime().setDevice(self.device_index)
        if not self._is_made and self._calling is not None:
            self._calling.join()  # a communicator that is still being made must not be aborted by another thread
        self._communicator.abort()
        while not (self._stream.is_drained() and self._copies.is_drained()):
            time.sleep(DRAIN_POLL_S)
        self._held.clear()
        self._stream.close()
        self._copies.close()

    def _beside(self, call: Callable[[], object], deadline: Deadline) -> None:
        """Make an NCCL call that may never return."""
        failures: list[Exception] = []

        def run() -> None:
            try:
                libraries.runtime().setDevice(self.device_index)
                _is_finished(call)
            except Exception as error:
                failures.append(error)

        thread = self._calling = threading.Thread(target=run, name="nccl-call", daemon=True)
        thread.start()
        deadline.wait_until(lambda: not thread.is_alive(), POLL_S)
        self._calling = None
        if failures:
            raise failures[0]

    def _is_settled(self) -> bool:
        """Whether the calls so far are done (not: what they put on the stream). Raises for an asynchronous error."""
        return self._guarded(lambda: _is_finished(self._communicator.check_async_error))

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """Make a call that does not wait, and never one after or during an abort."""
        with self._lock:
            if self._is_aborted:
                raise WeightPushFailed("the NCCL group was aborted")
            return call()


def _is_finished(call: Callable[[], object]) -> bool:
    """Make an NCCL call; False when NCCL answers that it is still at it."""
    try:
        call()
    except KeyError as error:
        # CuPy's table of NCCL's results ends before this one.
        if error.args != (IN_PROGRESS,):
            raise WeightPushFailed(f"NCCL failed with result {error}") from error
        return False
    except RuntimeError as error:
        if getattr(error, "status", None) == IN_PROGRESS:
            return False
        first_line = str(error).partition("\n")[0]
        raise WeightPushFailed(f"NCCL failed: {first_line}") from error
    return True


def nonblocking_config(nccl: Any) -> Any:
    """NCCL's own configuration with `blocking = 0`, or None where this CuPy cannot express it.

    CuPy 14 holds the structure (size, magic, version, blocking, …) but gives access to other fields only."""
    try:
        config = nccl.NcclConfig()
    except (AttributeError, RuntimeError):
        return None
    try:
        config.blocking = 0
        return config
    except AttributeError:
        pass
    raw = ctypes.string_at(id(config), type(config).__basicsize__)
    blocking_at = raw.find(_CONFIG_MAGIC) + 2 * 4
    if _CONFIG_MAGIC not in raw or struct.unpack_from("<i", raw, blocking_at)[0] != _UNDEFINED:
        return None
    ctypes.c_int32.from_address(id(config) + blocking_at).value = 0
    return config
