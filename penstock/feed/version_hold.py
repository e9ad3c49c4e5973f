"""Keeps one server at the version it serves while an evaluation runs. The other servers follow training."""

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
STABLE_S = 1.5
"""How long the reported version must stay the same. A push that began before the server was pinned may still move it,
and a report is up to half a second old."""
STABLE_TIMEOUT_S = 120.0
RETURN_TIMEOUT_S = 2.0
"""How long a server that has moved may take to return to its pinned version; doubled each time. It returns after
loading the version's snapshot if that is kept. Otherwise it never does, and the pin follows the server."""


class VersionHold:
    """Pins an evaluation, and one server to answer it, to the version that this server has.

    `note` is a file that names both while they are pinned, so that the next process can unpin what a killed one left.
    If the server is lost or moves to another version, the hold ends and all servers answer the remaining prompts: the
    evaluation may then span versions, but it never waits for a server that does not come back."""

    def __init__(
        self, policies: PolicyRegistry, fleet: Fleet, note: Path, *, max_silence_s: float, num_servers: int,
        join_timeout_s: float,
    ) -> None:  # fmt: skip
        self.policies = policies
        self.fleet = fleet
        self.note = note
        self.max_silence_s = max_silence_s
        self.num_servers = num_servers
        """Number of servers that the run starts with. The first evaluation waits up to `join_timeout_s` for two of
        them."""
        self.join_timeout_s = join_timeout_s
        self._has_begun = False
        self._server_id = ""
        self._version = -1

    async def begin(self, evaluation_id: str) -> None:
        """Pin a server and the evaluation. Call it before the evaluation is created. A server that is alone is not
        pinned, because no server would be left for training."""
        await self.end()
        free = await self._free_servers()
        if len(free) < 2 or await self.policies.pinned_version(evaluation_id) is not None:
            return
        chosen = max(free, key=lambda server: (server.policy_version, -server.running_groups))
        self.note.parent.mkdir(parents=True, exist_ok=True)
        self.note.write_text(json.dumps([chosen.server_id, evaluation_id]))
        self._server_id = chosen.server_id
        if await self._pin_until_stable(chosen.policy_version):
            await self.policies.pin(evaluation_id, self._version)
            logger.info("%s answers %s with version %d", self._server_id, evaluation_id, self._version)
        else:
            logger.warning("%s cannot be held at a version; all servers answer %s", self._server_id, evaluation_id)
            await self.end()

    async def keep(self) -> None:
        """Check the server, and end the hold if it can no longer answer."""
        if not self._server_id:
            return
        server = await self._server()
        if server is None or server.policy_version != self._version:
            logger.warning("%s is no longer held at version %d; all servers answer", self._server_id, self._version)
            await self.end()

    async def end(self) -> None:
        """Unpin what this process, or one that was killed, has pinned."""
        self._server_id = ""
        try:
            pinned = json.loads(self.note.read_text())
        except FileNotFoundError:
            return
        except ValueError:  # incomplete after a crash of the machine: nothing was pinned yet
            pinned = []
        for name in pinned:
            await self.policies.unpin(name)
        self.note.unlink(missing_ok=True)

    async def _free_servers(self) -> list[ServerRecord]:
        """Servers that serve and are not pinned. A run that has just started gets time until it has two."""
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

    async def _pin_until_stable(self, version: int) -> bool:
        """Pin the server to its version and wait until it reports this version for STABLE_S. A push that had begun may
        still move the server: then it returns to the pinned version, or the pin follows it."""
        await self.policies.pin(self._server_id, version)
        self._version, return_timeout_s = version, RETURN_TIMEOUT_S
        agreed_at = pinned_at = time.monotonic()
        deadline = pinned_at + STABLE_TIMEOUT_S
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
            server, now = await self._server(), time.monotonic()
            if server is None:
                return False
            if server.policy_version == self._version and server.state == "READY":
                if now - agreed_at >= STABLE_S:
                    return True
                continue
            agreed_at = now
            if server.policy_version != self._version and now - pinned_at >= return_timeout_s:
                self._version, pinned_at = server.policy_version, now
                return_timeout_s *= 2
                await self.policies.pin(self._server_id, self._version)
        return False

    async def _server(self) -> ServerRecord | None:
        return next((s for s in await self._alive() if s.server_id == self._server_id), None)

    async def _alive(self) -> list[ServerRecord]:
        """Servers with a fresh heartbeat that may answer."""
        quarantined = await self.fleet.quarantined()
        return [
            server
            for server in await self.fleet.servers()
            if server.heartbeat_age_ms < 1000 * self.max_silence_s and server.server_id not in quarantined
        ]
