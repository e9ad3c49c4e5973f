"""Operators' orders to a run. The gateway writes them to Redis; the servers and the learner follow them.

paused         no prompt is leased (lease.lua)
stop_term      a learner of this term or an earlier one ends after its step and writes a checkpoint
held_version   servers load this version's snapshot and stay there; the learner pushes nothing
num_rewinds    how many rewinds were ordered; for each one the learner rewinds to the weights of rewind_version
drained        servers that lease nothing (lease.lua)

The queue itself pauses the leasing of a server while everything that it tries fails (lua/prelude_breaker.lua). The
learner keeps servers whose log-probs disagree with its own in quarantine (penstock.store.fleet).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.store.fleet import Quarantine, Quarantines
from penstock.store.redis_client import RunRecords, guarded


@dataclass(frozen=True)
class OpenBreaker:
    """An open breaker, as operators see it. replay/lua/prelude_breaker.lua describes when it opens and closes."""

    server_id: str
    reason: str
    """Reason of the newest failure."""
    num_failures: int
    """Leases that failed since the server's last success."""
    open_s: float
    """Seconds since it opened."""
    probe_in_s: float
    """Seconds until the next probe."""

    @classmethod
    def read(cls, server_id: str, record: Mapping[str, float | str], now_ms: int) -> OpenBreaker | None:
        """Read what replay/lua/prelude_breaker.lua stored; None for a closed breaker."""
        opened_ms = int(record["opened_ms"])
        if not opened_ms:
            return None
        open_s, probe_in_s = (now_ms - opened_ms) / 1000, (int(record["probe_ms"]) - now_ms) / 1000
        return cls(server_id, str(record["reason"]), int(record["failures"]), max(0.0, open_s), max(0.0, probe_in_s))


@dataclass(frozen=True)
class Orders:
    is_paused: bool = False
    stop_term: int = 0
    held_version: int | None = None
    term: int = 0
    num_rewinds: int = 0
    rewind_version: int = 0
    """Version of the newest order to rewind. A release does not change it."""

    @property
    def is_stopped(self) -> bool:
        """Whether the current learner, if there is one, was ordered to end."""
        return self.is_paused and self.stop_term >= self.term > 0


class RunControl(RunRecords):
    """Orders of one run. Each order is one write, and repeating it changes nothing."""

    async def orders(self) -> Orders:
        fields = ("paused", "held_version", "stop_term", "term", "num_rewinds", "rewind_version")
        paused, held, *numbers = await guarded(self.client.hmget(self.keys.counters, fields))
        stop_term, term, num_rewinds, version = (int(number or 0) for number in numbers)
        return Orders(paused == b"1", stop_term, int(held) if held else None, term, num_rewinds, version)

    async def pause(self, reason: str = "") -> None:
        """Pause leasing. A run that pauses itself gives the reason, which stays until the run is resumed."""
        if reason:
            await guarded(self.client.set(self.keys.pause_reason, reason))
        await self._set(paused=1)

    async def pause_reason(self) -> str:
        """Why the run paused itself; empty if it did not."""
        reason: bytes | None = await guarded(self.client.get(self.keys.pause_reason))
        return reason.decode() if reason else ""

    async def resume(self) -> None:
        """End a pause, close every breaker, so that all servers lease prompts again, and remove the notices."""
        await guarded(self.client.unlink(self.keys.pause_reason, self.keys.notices, self.keys.breakers))
        await self._set(paused=0)

    async def open_breakers(self) -> list[OpenBreaker]:
        """Servers whose leasing is paused because everything they try fails."""
        records = await self.hash_of(self.keys.breakers)
        if not records:
            return []
        now_ms = await self.now_ms()
        found = [OpenBreaker.read(server, json.loads(text), now_ms) for server, text in records.items()]
        return [breaker for breaker in found if breaker is not None]

    async def quarantines(self) -> dict[str, Quarantine]:
        """Servers whose groups are not trained because their log-probs disagree with the learner's."""
        return await Quarantines(self.client, self.run).read()

    async def stop(self) -> None:
        """Pause the run and end the learner of the current term. One that starts later takes a new term and runs."""
        await self._set(paused=1, stop_term=(await self.orders()).term)

    async def hold(self, policy_version: int) -> None:
        await self.call("hold_version", policy_version)

    async def release(self) -> None:
        await guarded(self.client.hdel(self.keys.counters, "held_version"))

    async def drain(self, server_id: str) -> None:
        await guarded(self.client.sadd(self.keys.drained, server_id))

    async def undrain(self, server_id: str) -> None:
        await guarded(self.client.srem(self.keys.drained, server_id))

    async def drained(self) -> frozenset[str]:
        return frozenset(name.decode() for name in await guarded(self.client.smembers(self.keys.drained)))

    async def _set(self, **fields: int) -> None:
        await guarded(self.client.hset(self.keys.counters, mapping=fields))
