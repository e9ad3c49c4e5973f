"""Forgets rollout servers that died without leaving the fleet, so that the list of servers shows those that exist."""

from __future__ import annotations

import asyncio
import logging

from penstock.errors import QueueFull, Unavailable
from penstock.store.fleet import Fleet
from penstock.store.notices import Event, Notices

logger = logging.getLogger(__name__)
FORGOTTEN_AFTER_S = 900.0
"""How long a server stays in the list without a heartbeat. Until then, alerts and the doctor name it."""
LOOK_S = 10.0


class SilentServers:
    """Forgets the silent servers of a run under a learner's term. A server that comes back joins again."""

    def __init__(self, fleet: Fleet, notices: Notices, term: int, max_silence_s: float = FORGOTTEN_AFTER_S) -> None:
        self.fleet = fleet
        self.notices = notices
        self.term = term
        self.max_silence_s = max_silence_s

    async def watch(self) -> None:
        """Runs for ever."""
        while True:
            try:
                await self.forget()
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot look for servers that have died: %s; trying again", error)
            await asyncio.sleep(LOOK_S)

    async def forget(self) -> None:
        """Forget the servers that have been silent for too long, and record a notice for each. Remove the notices of
        those that are back."""
        for server_id, silence_s in (await self.fleet.forget_silent(self.max_silence_s, self.term)).items():
            text = (
                f"{server_id} sent no heartbeat for {silence_s / 60:.0f} min and has left the list of servers; read "
                "its log, and start it again if the run needs it"
            )
            logger.warning("%s", text)
            await self.notices.record(Event("server_lost", server_id, text))
        await self.notices.remove([Event("server_lost", server.server_id, "") for server in await self.fleet.servers()])
