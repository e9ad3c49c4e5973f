"""Waits for what other processes do: they send no event, so the state is asked for again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1
T = TypeVar("T")


def until(found: Callable[[], T], about: str, timeout_s: float = 120) -> T:
    """Return what `found` returns as soon as that is true, and fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {about}"
        time.sleep(POLL_S)
    return result
