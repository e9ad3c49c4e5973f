"""A server that is kept at the version it serves while an evaluation runs; the others follow training."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord
from penstock.store.policies import PolicyRegistry

logger = logging.getLogger(__name__)
POLL_S = 0.25
SETTLED_S = 1.5
"""For so long a server must say that it serves the version it is pinned to. A push that began before it was pinned may
still flip it, and what it reports is half a second old."""
SETTLE_TIMEOUT_S = 120.0
PATIENCE_S = 2.0
"""For the server to come back to the version it is pinned to, twice as long each time: where a snapshot of it is kept,
it does, in whatever time loading takes; else it never will."""


class VersionHold:
    """Pins an evaluation, and one server to answer it, to the version that this server has.

    `note` is a file that names both while they are pinned: what a killed process left pinned, the next one frees. A
    server that is lost or moved meanwhile ends the hold, and the rest is answered by the fleet: such an evaluation may
    span versions, but never waits for a server that does not come back."""

    def __init__(
        self, policies: PolicyRegistry, fleet: Fleet, note: Path, *, max_silence_s: float, num_servers: int,
        join_timeout_s: float,
    ) -> None:  # fmt: skip
        self.policies = policies
        self.fleet = fleet
        self.note = note
        self.max_silence_s = max_silence_s
        self.num_servers = num_servers
        """That the run starts with. The first evaluation waits for two of them, no longer than `join_timeout_s`."""
        self.join_timeout_s = join_timeout_s
        self._has_begun = False
        self._server_id = ""
        self._version = -1

    async def begin(self, evaluation_id: str) -> None:
        """Call it before the evaluation is created. A server that is alone is not held: nobody would train."""
        await self.end()
        free = await self._free_servers()
        if len(free) < 2 or await self.policies.pinned_version(evaluation_id) is not None:
            return
        chosen = max(free, key=lambda server: (server.policy_version, -server.running_groups))
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.write_text(json.dumps([chosen.server_id, evaluation_id]))
        self._server_id = chosen.server_id
        if await self._settle(chosen.policy_version):
            await self.policies.pin(evaluation_id, self._version)
            logger.info("%s answers %s with version %d", self._server_id, evaluation_id, self._version)
        else:
            logger.warning("%s cannot be held at a version; all servers answer %s", self._server_id, evaluation_id)
            await self.end()

    async def keep(self) -> None:
        """Look after the server, and give it up where it can no longer answer."""
        if not self._server_id:
            return
        server = await self._server()
        if server is None or server.policy_version != self._version:
            logger.warning("%s is no longer held at version %d; all servers answer", self._server_id, self._version)
            await self.end()

    async def end(self) -> None:
        """Free what is pinned, by this process or by one that was killed."""
        self._server_id = ""
        try:
            pinned = json.loads(self.note.read_text())
        except FileNotFoundError:
            return
        except ValueError:  # cut by a machine that went down, before anything was pinned
            pinned = []
        for name in pinned:
            await self.policies.unpin(name)
        self.note.unlink(missing_ok=True)

    async def _free_servers(self) -> list[ServerRecord]:
        """Those that serve and are not pinned. A run that has just started is given time to have two."""
        deadline = time.monotonic() + (0 if self._has_begun else self.join_timeout_s)
        self._has_begun = True
        while True:
            alive, pins = await self._alive(), await self.policies.pins()
            free = [s for s in alive if s.state in SERVING_STATES and s.server_id not in pins]
            num_pinned = sum(server.server_id in pins for server in alive)
            may_come = max(self.num_servers, len(alive)) - num_pinned >= 2
            if len(free) >= 2 or not may_come or time.monotonic() >= deadline:
                return free
            await asyncio.sleep(POLL_S)

    async def _settle(self, version: int) -> bool:
        """Pin the server to the version it has, until the two agree and stay so. A push that had begun may move it on:
        then it comes back, or the pin follows it."""
        await self.policies.pin(self._server_id, version)
        self._version, patience_s = version, PATIENCE_S
        agreed_at = pinned_at = time.monotonic()
        deadline = pinned_at + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            server, now = await self._server(), time.monotonic()
            if server is None:
                return False
            if server.policy_version == self._version and server.state == "READY":
                if now - agreed_at >= SETTLED_S:
                    return True
                continue
            agreed_at = now
            if server.policy_version != self._version and now - pinned_at >= patience_s:
                self._version, pinned_at, patience_s = server.policy_version, now, 2 * patience_s
                await self.policies.pin(self._server_id, self._version)
        return False

    async def _server(self) -> ServerRecord | None:
        return next((s for s in await self._alive() if s.server_id == self._server_id), None)

    async def _alive(self) -> list[ServerRecord]:
        return [s for s in await self.fleet.servers() if s.heartbeat_age_ms < 1000 * self.max_silence_s]
