"""The servers that take new versions, and when those that failed in a push are tried again."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from penstock.config.run import RunConfig
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord, ServerState
from penstock.store.fleet_view import FleetView
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import RunControl
from penstock_learner.weights.push import PushReport

logger = logging.getLogger(__name__)
MAX_VIEW_AGE_S = 5.0
"""How often the whole fleet is read although nothing in it has changed."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 2.0, 15.0
"""Time until a server that failed in a push is tried again, after the first failure and at most."""


class Followers:
    """The servers of a run that take new versions, under a learner's term. A server that failed in a push is left out
    for a time, which doubles with each failure in a row, up to MAX_BACKOFF_S."""

    def __init__(self, config: RunConfig, fleet: Fleet, policies: PolicyRegistry, term: int) -> None:
        self.config = config
        self.fleet = fleet
        self.view = FleetView(fleet, MAX_VIEW_AGE_S)
        self.control = RunControl(fleet.client, config.run)
        self.policies = policies
        self.term = term
        self._failures: dict[str, tuple[int, float]] = {}
        """For each server its failed pushes in a row, and when it may be tried again."""

    @property
    def any_failed(self) -> bool:
        return bool(self._failures)

    def has_failed(self, server_id: str) -> bool:
        """Whether the server failed in its last push."""
        return server_id in self._failures

    async def in_states(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """The reachable servers that take new versions.

        Servers that an operator has pinned to a version are left out. While the servers are rolled back, there are
        none."""
        reachable = await self._reachable(states)
        if (await self.control.orders()).held_version is not None:
            return []
        pins = await self.policies.pins()
        return [server for server in reachable if server.server_id not in pins]

    async def are_settled(self) -> bool:
        """Whether no server is STALE, and no serving one is silent, without a look at each of them.

        A server that becomes STALE changes the view at once. None becomes silent before the reading says so."""
        reading = await self.view.look()
        is_stale = any(server.state == "STALE" for server in reading.servers)
        return not is_stale and reading.first_silence_s(self.config.replay.lease_ttl_s) > 0

    async def record(self, report: PushReport, state: ServerState) -> None:
        """Give the members that committed their state. Evict those that failed, and count the failure."""
        await self.fleet.set_states(report.committed, state, self.term)
        for server_id in report.committed:
            self._failures.pop(server_id, None)
        await self.fleet.set_states(list(report.failed), "EVICTED", self.term)
        for server_id, reason in report.failed.items():
            logger.warning("%s is evicted from the weight group: %s", server_id, reason)
            failures = self._failures.get(server_id, (0, 0.0))[0] + 1
            backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)
            self._failures[server_id] = (failures, time.monotonic() + backoff_s)

    async def _reachable(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """Servers in one of the states, with a fresh heartbeat, that have not just failed.

        A serving server without heartbeats is evicted. If it wakes up, it must load a version before it leases."""
        limit_ms = self.config.replay.lease_ttl_s * 1000
        reachable = []
        for server in await self.fleet.servers():
            is_silent = server.heartbeat_age_ms >= limit_ms
            if is_silent and server.state in SERVING_STATES:
                logger.warning("%s is evicted: silent for %.1f s", server.server_id, server.heartbeat_age_ms / 1000)
                await self.fleet.set_state(server.server_id, "EVICTED", self.term)
            retry_at = self._failures.get(server.server_id, (0, 0.0))[1]
            if not is_silent and server.state in states and time.monotonic() >= retry_at:
                reachable.append(server)
        return reachable
