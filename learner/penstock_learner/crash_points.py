"""Named places at which fault tests kill the learner: PENSTOCK_CRASH_AT=name[:count]."""

from __future__ import annotations

import os
import signal
from collections import Counter

ENVIRONMENT = "PENSTOCK_CRASH_AT"
NAMES = ("after_read", "mid_step", "before_flush", "after_flush", "after_commit")
_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Die as by `kill -9` when the environment names this place, at its count-th passing (default the first)."""
    wanted = os.environ.get(ENVIRONMENT)
    if not wanted:
        return
    place, _, count = wanted.partition(":")
    _passed[name] += 1
    if place == name and _passed[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)
