"""Which rollout server answers a generate call.

Any server that serves the right version may answer, the least busy first. A session stays with the server that answered
its earlier calls, because that has the keys and values of the conversation cached, unless the server

    is lost, drained, quarantined or not ready      it is not among the candidates
    is overloaded                                   it has `gateway.sessions.max_extra_calls` more calls than another
    has a version that the run no longer admits     older than `replay.max_staleness` steps behind the newest one served
"""

from __future__ import annotations

import asyncio
import heapq
import random
import time
from collections import Counter
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config.run import RunConfig
from penstock.errors import Conflict, ModelNotFound, PenstockError, Unavailable
from penstock.store.fleet import (
    SERVING_STATES,
    Fleet,
    FleetReading,
    FleetView,
    PolicyRegistry,
    RunControl,
    ServerRecord,
)
from penstock.v1 import generate_pb2

MAX_TRIES = 3
"""How many servers are tried until one answers."""
MAX_COMPARED = 16
"""A larger fleet is sampled: this many servers are drawn, and the least busy of them is chosen. So a call costs the
same in a fleet of 1,000, and the load stays even: two would be enough for that."""
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


class ServerChoice:
    """Chooses servers of one run. `running` has the number of this gateway's calls to each.

    Drains, quarantines, states and versions count at once: every choice asks Redis for them. A server that has died is
    skipped once it has been silent for `replay.lease_ttl_s`."""

    def __init__(self, config: RunConfig, fleet: Fleet, policies: PolicyRegistry, control: RunControl) -> None:
        self.config = config
        self.policies = policies
        self.fleet = fleet
        self.control = control
        self.view = FleetView(fleet, MAX_VIEW_AGE_S, RARELY_USED_AGE_S)
        self.running: Counter[str] = Counter()
        self._chosen: Counter[str] = Counter()
        """How often each server was the first choice. Servers that are equally busy take turns."""
        self._last_ready: tuple[FleetReading, frozenset[str], ReadyServers] | None = None
        self._last_unpinned: tuple[ReadyServers, Mapping[str, int], list[ServerRecord], int] | None = None

    async def choose(
        self, key_name: str, request: generate_pb2.GenerateRequest, known: Sequence[str]
    ) -> tuple[int | None, list[ServerRecord]]:
        """The version that the call must be answered with, if any, and up to MAX_TRIES servers to try, in order.
        `known` are the servers that have answered the session, the best one first."""
        ready, pins = await asyncio.gather(self._ready(), self.policies.pins())
        version = _version_for(key_name, request, pins)
        fit = self._fit(ready, version, pins)
        if not fit:  # a server of a Penstock that does not count its changes may have reported the version
            ready = await self._arrange(self.view.read())
            fit = self._fit(ready, version, pins)
        if not fit:
            raise _why_none_fits(ready, version, is_named=request.HasField("policy_version"))
        compared = fit if len(fit) <= MAX_COMPARED else random.sample(fit, MAX_COMPARED)
        servers = heapq.nsmallest(MAX_TRIES, compared, key=self._busyness)
        if known and self.config.gateway.sessions.sticky:
            newest = version if version is not None else self._unpinned(ready, pins)[1]
            mine = [ready.by_id[server_id] for server_id in known if server_id in ready.by_id]
            servers = self._with_known_first(servers, _fitting(mine, version, pins), newest)
        self._chosen[servers[0].server_id] += 1
        return version, servers

    async def served_versions(self) -> dict[int, list[str]]:
        """Ids of the servers that would answer, by version."""
        ready = await self._arrange(self.view.read())
        return {version: [server.server_id for server in servers] for version, servers in ready.by_version.items()}

    async def _ready(self) -> ReadyServers:
        """Servers that answer calls now. Their loads may be MAX_VIEW_AGE_S older than in Redis, or RARELY_USED_AGE_S if
        there are fewer calls than servers."""
        ready = await self._arrange(self.view.current())
        return ready if time.monotonic() < ready.first_silent_at else await self._arrange(self.view.read())

    async def _arrange(self, asked: Awaitable[FleetReading]) -> ReadyServers:
        drained, quarantined, reading = await asyncio.gather(self.control.drained(), self.fleet.quarantined(), asked)
        excluded = drained | quarantined
        if self._last_ready is None or self._last_ready[0] is not reading or self._last_ready[1] != excluded:
            self._last_ready = reading, excluded, self._without(excluded, reading)
        return self._last_ready[2]

    def _without(self, excluded: Collection[str], reading: FleetReading) -> ReadyServers:
        max_silence_s = self.config.replay.lease_ttl_s
        ready = [
            server
            for server in reading.servers
            if server.state in SERVING_STATES
            and server.heartbeat_age_ms <= 1000 * max_silence_s
            and server.server_id not in excluded
        ]
        longest_ms = max((server.heartbeat_age_ms for server in ready), default=0)
        return ReadyServers(ready, reading.read_at + max_silence_s - longest_ms / 1000)

    def _fit(self, ready: ReadyServers, version: int | None, pins: Mapping[str, int]) -> Sequence[ServerRecord]:
        """All servers that may answer a call for the version."""
        return self._unpinned(ready, pins)[0] if version is None else ready.by_version.get(version, [])

    def _unpinned(self, ready: ReadyServers, pins: Mapping[str, int]) -> tuple[list[ServerRecord], int]:
        """The servers that are not pinned, and the newest version that one of them serves. They are found once for
        each reading of the fleet, not for each call."""
        if self._last_unpinned is None or self._last_unpinned[0] is not ready or self._last_unpinned[1] != pins:
            servers = _fitting(ready.servers, None, pins)
            newest = max((server.policy_version for server in servers), default=-1)
            self._last_unpinned = ready, pins, servers, newest
        return self._last_unpinned[2:]

    def _busyness(self, server: ServerRecord) -> tuple[int, int, int]:
        server_id = server.server_id
        return self.running.get(server_id, 0), server.running_groups, self._chosen.get(server_id, 0)

    def _with_known_first(
        self, servers: list[ServerRecord], known: Sequence[ServerRecord], newest: int
    ) -> list[ServerRecord]:
        """The servers, with the one first that has most of the session cached, if it may keep the session. `newest` is
        the newest version that a server could answer with."""
        fewest = self.running.get(servers[0].server_id, 0)
        for server in known:
            extra_calls = self.running.get(server.server_id, 0) - fewest
            is_too_old = newest - server.policy_version > self.config.replay.max_staleness
            if extra_calls <= self.config.gateway.sessions.max_extra_calls and not is_too_old:
                return [server, *(other for other in servers if other is not server)][:MAX_TRIES]
        return servers


def _fitting(servers: Sequence[ServerRecord], version: int | None, pins: Mapping[str, int]) -> list[ServerRecord]:
    """The servers that may answer a call for the version. A pinned one answers only calls that name its version."""
    return [
        server
        for server in servers
        if server.policy_version == version or (version is None and server.server_id not in pins)
    ]


def _why_none_fits(ready: ReadyServers, version: int | None, *, is_named: bool) -> PenstockError:
    """`is_named` says that the call itself names the version."""
    if not ready.servers:
        return Unavailable("no rollout server is ready; see the run's servers")
    if version is None:
        return Unavailable("every rollout server that is ready is pinned to a version; unpin one, or name a version")
    served = sorted(ready.by_version)
    if is_named:
        return ModelNotFound(f"no server serves version {version}, only {served}; name one of these")
    return Conflict(f"no server serves version {version}, only {served}; unpin it, or rewind to it")


def _version_for(key_name: str, request: generate_pb2.GenerateRequest, pins: Mapping[str, int]) -> int | None:
    """The version that the call asks for, else the one that its session or its key is pinned to, else None."""
    if request.HasField("policy_version"):
        return request.policy_version
    by_session = pins.get(request.session_id) if request.session_id else None
    return by_session if by_session is not None else pins.get(key_name)
