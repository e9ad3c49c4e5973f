"""Which rollout server answers a generate call.

Any server that serves the right version may answer, the least busy first. A session stays with the server that answered
its earlier calls, because that has the keys and values of the conversation cached, unless the server

    is gone, drained, quarantined or not ready      it is not among those that may answer
    is overloaded                                   it has `gateway.sessions.max_extra_calls` more calls than another
    has a version that the run no longer admits     older than `replay.max_staleness` steps behind the newest one served
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.config.run import RunConfig
from penstock.errors import Conflict, ModelNotFound, Unavailable
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import RunControl
from penstock.v1 import generate_pb2


class ServerChoice:
    """Chooses servers of one run. `running` has the number of this gateway's calls to each."""

    def __init__(self, config: RunConfig, fleet: Fleet, policies: PolicyRegistry, control: RunControl) -> None:
        self.config = config
        self.fleet = fleet
        self.policies = policies
        self.control = control
        self.running: Counter[str] = Counter()
        self._chosen: Counter[str] = Counter()
        """How often each server was the first choice. Servers that are equally busy take turns."""

    async def choose(
        self, key_name: str, request: generate_pb2.GenerateRequest, known: Sequence[str]
    ) -> tuple[int | None, list[ServerRecord]]:
        """The version that the call must be answered with, if any, and the servers to try, in order. `known` are the
        servers that have answered the session, the best one first."""
        ready, pins = await asyncio.gather(self.ready(), self.policies.pins())
        version = _version_for(key_name, request, pins)
        fit = self._fit(ready, version, pins, is_named=request.HasField("policy_version"))
        servers = self._with_known_first(fit, known)
        self._chosen[servers[0].server_id] += 1
        return version, servers

    async def ready(self) -> list[ServerRecord]:
        """Servers that answer calls."""
        silence_ms = 1000 * self.config.replay.lease_ttl_s
        drained, quarantined, servers = await asyncio.gather(
            self.control.drained(), self.fleet.quarantined(), self.fleet.servers()
        )
        return [
            server
            for server in servers
            if server.state in SERVING_STATES and server.heartbeat_age_ms <= silence_ms
            and server.server_id not in drained | quarantined
        ]  # fmt: skip

    def _fit(
        self, ready: Sequence[ServerRecord], version: int | None, pins: Mapping[str, int], *, is_named: bool
    ) -> list[ServerRecord]:
        """Servers that may answer, the least busy first. `is_named` says that the call itself names the version."""
        if not ready:
            raise Unavailable("no rollout server is ready; see the run's servers")
        fit = [
            server
            for server in ready
            if server.policy_version == version or (version is None and server.server_id not in pins)
        ]
        if not fit and version is None:
            raise Unavailable("every rollout server that is ready is pinned to a version; unpin one, or name a version")
        if not fit:
            served = sorted({server.policy_version for server in ready})
            if is_named:
                raise ModelNotFound(f"no server serves version {version}, only {served}; name one of these")
            raise Conflict(f"no server serves version {version}, only {served}; unpin it, or roll back to it")
        return sorted(fit, key=self._busyness)

    def _busyness(self, server: ServerRecord) -> tuple[int, int, int]:
        return self.running[server.server_id], server.running_groups, self._chosen[server.server_id]

    def _with_known_first(self, fit: list[ServerRecord], known: Sequence[str]) -> list[ServerRecord]:
        """The servers, with the one first that has most of the session cached, if it may keep the session."""
        limits = self.config.gateway.sessions
        if not limits.sticky:
            return fit
        fewest = min(self.running[server.server_id] for server in fit)
        newest = max(server.policy_version for server in fit)
        keeping = {
            server.server_id: server
            for server in fit
            if self.running[server.server_id] - fewest <= limits.max_extra_calls
            and newest - server.policy_version <= self.config.replay.max_staleness
        }
        kept = next((keeping[server_id] for server_id in known if server_id in keeping), None)
        return fit if kept is None else [kept, *(server for server in fit if server is not kept)]


def _version_for(key_name: str, request: generate_pb2.GenerateRequest, pins: Mapping[str, int]) -> int | None:
    """The version that the call asks for, else the one that its session or its key is pinned to, else None."""
    if request.HasField("policy_version"):
        return request.policy_version
    by_session = pins.get(request.session_id) if request.session_id else None
    return by_session if by_session is not None else pins.get(key_name)
