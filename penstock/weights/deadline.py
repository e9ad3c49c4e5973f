"""The deadline of a weight transfer, which an abort can end early."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.errors import WeightPushFailed

POLL_S = 0.002
"""Polling interval for things that cannot block with a deadline: CUDA, NCCL, gloo, the memory of another process."""


class Deadline:
    """A point in time, `timeout_s` from now. Error messages name the work by `activity`.

    Every wait of a transfer takes one. The wait raises WeightPushFailed when the time is up or `aborted` is set."""

    def __init__(self, timeout_s: float, activity: str, aborted: threading.Event | None = None) -> None:
        self._ends_at = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._activity = activity
        self._aborted = aborted or threading.Event()

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 1 ms: the value is handed on as a timeout, which must be positive."""
        return max(self._ends_at - time.monotonic(), 0.001)

    def check(self) -> None:
        """Raise WeightPushFailed if the work was aborted or its time is up."""
        if self._aborted.is_set():
            raise WeightPushFailed(f"{self._activity} was aborted")
        if time.monotonic() > self._ends_at:
            raise WeightPushFailed(f"{self._activity} took longer than {self._timeout_s:g} s; is the other side alive?")

    def sleep(self, interval_s: float = POLL_S) -> None:
        """Check the deadline, then sleep for one polling interval. An abort ends the sleep."""
        self.check()
        self._aborted.wait(interval_s)

    def wait_until(self, is_done: Callable[[], bool], interval_s: float = POLL_S) -> None:
        """Poll until `is_done` returns True."""
        while not is_done():
            self.sleep(interval_s)

    def wait_for(self, condition: threading.Condition, is_done: Callable[[], bool]) -> None:
        """Block until `is_done` returns True; whoever changes its answer notifies `condition`.

        An abort does not end this wait, so use it only with a deadline that has no `aborted` event."""
        with condition:
            while not condition.wait_for(is_done, self.remaining_s):
                self.check()
