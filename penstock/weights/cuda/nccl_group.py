"""An NCCL communicator with deadlines. The publisher is rank 0; every worker of every member has a rank.

NCCL itself waits for its peers for ever. So its calls are non-blocking if this CuPy supports that, or else made in a
separate thread, and every wait polls with a Deadline. `abort` ends everything that still runs.
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

from penstock.errors import WeightPushFailed, first_line_of
from penstock.weights.cuda import libraries
from penstock.weights.cuda.stream import POLL_S, DeviceStream
from penstock.weights.deadline import Deadline
from penstock.weights.transports import PUBLISHER_RANK

MAX_ENQUEUED = 32
"""Upper bound on enqueued broadcasts that are not known to be done. CUDA's queue must not fill up: it would block."""
ABORT_TIMEOUT_S = 5.0
DRAIN_POLL_S = 0.01
IN_PROGRESS = 7
"""The result code ncclInProgress."""
_CONFIG_MAGIC = struct.pack("<I", 0xCAFEBEEF)
_UNDEFINED = -(2**31)

_T = TypeVar("_T")


@dataclass(frozen=True)
class NcclMeeting:
    """The rendezvous of nccl."""

    sender: str
    """Id of the sender, which has one group at a time."""
    group: str
    unique_id: str
    """NCCL's unique id, in hex."""
    kept: bool
    """The group exists already. A worker that has left it fails the push."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> NcclMeeting:
        try:
            fields = json.loads(text)
            return NcclMeeting(
                str(fields["sender"]), str(fields["group"]), str(fields["unique_id"]), bool(fields["kept"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise WeightPushFailed(f"the rendezvous of nccl cannot be read: {error!r}") from error


class NcclGroup:
    """Call `open` first, then `broadcast` and `wait` as often as needed, and `abort` at the end.

    One thread uses the group, but any thread may abort it. It is not usable after a failure."""

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
        """Create the communicator together with all other ranks."""
        self._stream = DeviceStream(self.device_index)
        self._copies = DeviceStream(self.device_index)
        # __new__ and __init__ apart: a non-blocking __init__ raises "in progress", and the object must survive that.
        kind = self._nccl.NcclCommunicator
        communicator = self._communicator = kind.__new__(kind)
        arguments = [self._world_size, self._unique_id, self._rank]
        if self._config is not None:
            arguments.append(self._config)
        self._call_in_thread(lambda: communicator.__init__(*arguments), deadline)
        deadline.wait_until(self._has_returned, POLL_S)
        self._is_made = True

    def broadcast(self, pointer: int, num_bytes: int, deadline: Deadline, hold: object = None) -> int:
        """Enqueue one in-place broadcast from the publisher. Returns the event of its end, for `wait`.

        `hold` owns the memory. The group keeps a reference as long as NCCL may access it."""

        def call() -> None:
            stream = self._stream.handle
            self._communicator.bcast(pointer, num_bytes, self._nccl.NCCL_UINT8, PUBLISHER_RANK, stream)

        if self._config is None:
            self._call_in_thread(call, deadline)
        else:
            self._guarded(lambda: _is_finished(call))
        deadline.wait_until(self._has_returned, POLL_S)
        event = self._guarded(self._stream.record)
        self._held[event] = hold
        return event

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
        if was_aborted or self._communicator is None:
            return
        # In a thread, because NCCL's abort can hang. The thread keeps the memory until NCCL has finished with it.
        thread = threading.Thread(target=self._abort, name="nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT_S)

    def _abort(self) -> None:
        libraries.runtime().setDevice(self.device_index)
        if not self._is_made and self._calling is not None:
            self._calling.join()  # no thread may abort a communicator that another one is still creating
        self._communicator.abort()
        while not (self._stream.is_drained() and self._copies.is_drained()):
            time.sleep(DRAIN_POLL_S)
        self._held.clear()
        self._stream.close()
        self._copies.close()

    def _call_in_thread(self, call: Callable[[], object], deadline: Deadline) -> None:
        """Make an NCCL call that may never return, in a thread that can be abandoned."""
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

    def _has_returned(self) -> bool:
        """Return whether all calls have returned; their work on the stream may go on. Raises asynchronous errors."""
        return self._guarded(lambda: _is_finished(self._communicator.check_async_error))

    def _guarded(self, call: Callable[[], _T]) -> _T:
        """Make a call that does not block, unless the group is aborted."""
        with self._lock:
            if self._is_aborted:
                raise WeightPushFailed("the NCCL group was aborted")
            return call()


def _is_finished(call: Callable[[], object]) -> bool:
    """Make an NCCL call. Returns False if NCCL answers that it is still in progress."""
    try:
        call()
    except KeyError as error:
        # CuPy's table of result codes does not contain this one.
        if error.args != (IN_PROGRESS,):
            raise WeightPushFailed(f"NCCL failed with result {error}") from error
        return False
    except RuntimeError as error:
        if getattr(error, "status", None) == IN_PROGRESS:
            return False
        first_line = first_line_of(error)
        raise WeightPushFailed(f"NCCL failed: {first_line}") from error
    return True


def nonblocking_config(nccl: Any) -> Any:
    """Return an NCCL configuration with `blocking = 0`, or None if this CuPy has no way to set it.

    CuPy 14 has the structure (size, magic, version, blocking, …) but gives no access to `blocking`, so the field is
    written in memory."""
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
