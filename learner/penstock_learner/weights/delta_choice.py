"""Decide whether `weights.delta: auto` sends a delta: whichever was faster in this run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

DELTA_TRANSPORTS = ("nccl", "gloo")
"""Transports by which `auto` sends deltas. The others copy inside one machine, faster than a delta can be made, or
write a file that late servers read too."""
NUM_REMEMBERED = 3
RETRY_AFTER = 50
"""After so many times the seconds of the slower kind, it is tried again. So trying costs 2 % of the time."""


@dataclass
class _Seconds:
    """The newest pushes by one transport to one set of members."""

    members: tuple[str, ...]
    of_delta: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    of_whole: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    since_other_s: float = 0.0
    """Seconds of all pushes since the slower kind was tried."""


class DeltaChoice:
    """Compares the seconds of pushes with a delta, from its encoding to the last commit, with those of whole buckets.

    The first push to a set of members is not counted, because connections are made in it. Then each kind is tried once,
    the delta first, and the faster one is used. The other one is tried again from time to time, because the share of
    weights that a step changes is not constant. Pushes whose delta turned out larger than the buckets count as deltas:
    the comparison was made in vain."""

    def __init__(self) -> None:
        self._seconds: dict[str, _Seconds] = {}

    def takes_delta(self, transport: str, members: Sequence[str]) -> bool:
        """Return whether the next push by this transport, to these members, should send a delta."""
        if transport not in DELTA_TRANSPORTS:
            return False
        seconds = self._seconds.get(transport)
        if seconds is None or seconds.members != tuple(members) or not seconds.of_delta:
            return True
        if not seconds.of_whole:
            return False
        delta_s, whole_s = statistics.median(seconds.of_delta), statistics.median(seconds.of_whole)
        is_retry_due = seconds.since_other_s >= RETRY_AFTER * max(delta_s, whole_s)
        return (delta_s <= whole_s) != is_retry_due

    def record(self, transport: str, members: Sequence[str], seconds_taken: float, *, tried_delta: bool) -> None:
        """Note how long a push took that every member committed."""
        seconds = self._seconds.get(transport)
        if seconds is None or seconds.members != tuple(members):
            self._seconds[transport] = _Seconds(tuple(members))
            return
        mine, other = seconds.of_delta, seconds.of_whole
        if not tried_delta:
            mine, other = other, mine
        mine.append(seconds_taken)
        is_slower = bool(other) and statistics.median(mine) > statistics.median(other)
        seconds.since_other_s = 0.0 if is_slower else seconds.since_other_s + seconds_taken
