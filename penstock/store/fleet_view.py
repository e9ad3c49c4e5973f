"""The fleet as it was read a moment ago, for callers that look at a large fleet many times a second.

Reading the fleet costs time for every server. A view reads one number of Redis instead, which counts the servers that
joined, left, or changed their state or version, and reads the fleet again only if

    the number has changed              so a view never shows a state or a version that a server has left
    the reading is `max_age_s` old      so loads and heartbeats are at most that old

The second bound also covers a Redis that went back to an earlier number, and servers of a Penstock that does not count.
A view for frequent calls may give it a second part: see `rarely_used_age_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord


@dataclass(frozen=True, eq=False)
class FleetReading:
    """All servers at one moment."""

    servers: Sequence[ServerRecord]
    num_changes: int
    """Changes of the fleet before the servers were read. A change meanwhile makes the next look read them again."""
    read_at: float
    """When the reading began, by the clock of time.monotonic."""

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.read_at

    def first_silence_s(self, max_silence_s: float) -> float:
        """In how many seconds a serving server may have been silent for `max_silence_s`, at the earliest. Not positive
        if one may be silent now."""
        ages_ms = (server.heartbeat_age_ms for server in self.servers if server.state in SERVING_STATES)
        return max_silence_s - max(ages_ms, default=0) / 1000 - self.age_s


class FleetView:
    """The newest reading of a fleet. Callers that look at the same time share one.

    With `rarely_used_age_s`, a reading that is `max_age_s` old is kept until there were as many looks at it as it has
    servers, or until it is `rarely_used_age_s` old. So a look costs the reading of one server at most, in any fleet,
    except where looks are so rare that their cost does not matter."""

    def __init__(self, fleet: Fleet, max_age_s: float, rarely_used_age_s: float | None = None) -> None:
        self.fleet = fleet
        self.max_age_s = max_age_s
        self.rarely_used_age_s = max_age_s if rarely_used_age_s is None else rarely_used_age_s
        self._reading: FleetReading | None = None
        self._num_looks = 0
        """Looks at the reading."""
        self._lock = asyncio.Lock()

    async def look(self) -> FleetReading:
        """The last reading if it still holds, otherwise a new one."""
        asked_at, num_changes = time.monotonic(), await self.fleet.num_changes()
        reading = self._reading
        if reading is not None and reading.num_changes == num_changes and not self._is_old(reading):
            self._num_looks += 1
            return reading
        return await self._read(asked_at)

    async def read(self) -> FleetReading:
        """A reading that began after this call."""
        return await self._read(time.monotonic())

    def _is_old(self, reading: FleetReading) -> bool:
        is_rarely_used = self._num_looks < len(reading.servers)
        return reading.age_s >= (self.rarely_used_age_s if is_rarely_used else self.max_age_s)

    async def _read(self, asked_at: float) -> FleetReading:
        async with self._lock:
            if self._reading is None or self._reading.read_at < asked_at:
                read_at, num_changes = time.monotonic(), await self.fleet.num_changes()
                self._reading = FleetReading(await self.fleet.servers(), num_changes, read_at)
                self._num_looks = 0
            return self._reading
