"""A deadline that an event can cut short: how every wait of a weight transfer ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.errors import WeightPushFailed

POLL_S = 0.002


class Patience:
    """Waits for `doing` until it is done, aborted, or out of time."""

    def __init__(self, timeout_s: float, doing: str, aborted: threading.Event | None = None) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._doing = doing
        self._aborted = aborted or threading.Event()

    @property
    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def over(self) -> bool:
        return self._aborted.is_set() or time.monotonic() > self._deadline

    def check(self) -> None:
        """Raise WeightPushFailed once it is over."""
        if self._aborted.is_set():
            raise WeightPushFailed(f"{self._doing} was aborted")
        if self.over:
            raise WeightPushFailed(f"{self._doing} took longer than {self._timeout_s:g} s; is the other side alive?")

    def pause(self, poll_s: float = POLL_S) -> None:
        """Wait a moment, or raise when there is no time left."""
        self.check()
        self._aborted.wait(poll_s)

    def until(self, done: Callable[[], bool], poll_s: float = POLL_S) -> None:
        while not done():
            self.pause(poll_s)
