"""The rollout servers that answer generate calls, arranged so that choosing one costs the same in a large fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Collection, Sequence
from dataclasses import dataclass, field

from penstock.config.run import RunConfig
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.store.fleet_view import FleetReading, FleetView
from penstock.store.run_control import RunControl

MAX_VIEW_AGE_S = 2.0
"""How old the loads may be by which a server is chosen. Servers report them twice a second."""
RARELY_USED_AGE_S = 10.0
"""The same while there were fewer calls than servers since the loads were read: so few calls pile up nowhere."""


@dataclass(frozen=True)
class ReadyServers:
    """Servers that answer calls, in one reading of the fleet."""

    servers: Sequence[ServerRecord]
    first_silent_at: float
    """When one of them may have been silent for too long, at the earliest, by the clock of time.monotonic."""
    by_version: dict[int, list[ServerRecord]] = field(init=False, default_factory=dict)
    by_id: dict[str, ServerRecord] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for server in self.servers:
            self.by_version.setdefault(server.policy_version, []).append(server)
            self.by_id[server.server_id] = server


class ReadyServersView:
    """Which servers answer calls.

    Drains, quarantines, states and versions count at once: every look asks Redis for them. A server that has died is
    left out once it has been silent for `replay.lease_ttl_s`."""

    def __init__(self, config: RunConfig, fleet: Fleet, control: RunControl) -> None:
        self.max_silence_s = config.replay.lease_ttl_s
        self.fleet = fleet
        self.control = control
        self.view = FleetView(fleet, MAX_VIEW_AGE_S, RARELY_USED_AGE_S)
        self._last: tuple[FleetReading, frozenset[str], ReadyServers] | None = None

    async def look(self) -> ReadyServers:
        """Servers that answer calls now. Their loads may be MAX_VIEW_AGE_S older than in Redis, or RARELY_USED_AGE_S if
        there are fewer calls than servers."""
        ready = await self._arrange(self.view.look())
        return ready if time.monotonic() < ready.first_silent_at else await self.read()

    async def read(self) -> ReadyServers:
        """The same, with loads as they are in Redis."""
        return await self._arrange(self.view.read())

    async def _arrange(self, looking: Awaitable[FleetReading]) -> ReadyServers:
        drained, quarantined, reading = await asyncio.gather(self.control.drained(), self.fleet.quarantined(), looking)
        excluded = drained | quarantined
        if self._last is None or self._last[0] is not reading or self._last[1] != excluded:
            self._last = reading, excluded, self._ready(reading, excluded)
        return self._last[2]

    def _ready(self, reading: FleetReading, excluded: Collection[str]) -> ReadyServers:
        ready = [
            server
            for server in reading.servers
            if server.state in SERVING_STATES
            and server.heartbeat_age_ms <= 1000 * self.max_silence_s
            and server.server_id not in excluded
        ]
        longest_ms = max((server.heartbeat_age_ms for server in ready), default=0)
        return ReadyServers(ready, reading.read_at + self.max_silence_s - longest_ms / 1000)
