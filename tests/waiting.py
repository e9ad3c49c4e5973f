"""Waits for changes in other processes. They send no event, so the state is polled."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1
T = TypeVar("T")


def until(found: Callable[[], T], about: str, timeout_s: float = 120) -> T:
    """Call `found` until its result is true, and return the result. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {about}"
        time.sleep(POLL_S)
    return result
