"""What operators tell a run: kept in Redis, written by the gateway, followed by the servers and the learner.

paused         no prompt is leased (lease.lua)
stop_term      the learner of this term, or an earlier one, ends after its step, with a checkpoint
held_version   servers load this version's snapshot and stay there; the learner pushes nothing
roll_backs     how many there were; the learner goes back to the weights of roll_back_version once for each
drained        servers that lease nothing (lease.lua)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis

from penstock.replay.redis_queue import key_prefix
from penstock.store.redis_errors import guarded

_HOLD = """
if redis.call('HGET', KEYS[1], 'held_version') ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'held_version', ARGV[1], 'roll_back_version', ARGV[1])
  redis.call('HINCRBY', KEYS[1], 'roll_backs', 1)
end
return 1
"""


@dataclass(frozen=True)
class Orders:
    is_paused: bool = False
    stop_term: int = 0
    held_version: int | None = None
    term: int = 0
    roll_backs: int = 0
    roll_back_version: int = 0
    """Of the last one, which a release does not undo."""

    @property
    def is_stopped(self) -> bool:
        """The learner that runs, if any does, was told to end."""
        return self.is_paused and self.stop_term >= self.term > 0


class RunControl:
    """Orders of one run. Each is one write, and repeating it changes nothing."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self._counters = f"{key_prefix(run)}counters"
        self._drained = f"{key_prefix(run)}drained"

    async def orders(self) -> Orders:
        fields = ("paused", "held_version", "stop_term", "term", "roll_backs", "roll_back_version")
        paused, held, *numbers = await guarded(self.client.hmget(self._counters, fields))
        stop_term, term, roll_backs, version = (int(number or 0) for number in numbers)
        return Orders(paused == b"1", stop_term, int(held) if held else None, term, roll_backs, version)

    async def pause(self) -> None:
        await self._set(paused=1)

    async def resume(self) -> None:
        await self._set(paused=0)

    async def stop(self) -> None:
        """Ends the learner of the current term. One that is started later takes a new term, and runs."""
        await self._set(paused=1, stop_term=(await self.orders()).term)

    async def hold(self, policy_version: int) -> None:
        await guarded(self.client.eval(_HOLD, 1, self._counters, policy_version))

    async def release(self) -> None:
        await guarded(self.client.hdel(self._counters, "held_version"))

    async def drain(self, server_id: str) -> None:
        await guarded(self.client.sadd(self._drained, server_id))

    async def undrain(self, server_id: str) -> None:
        await guarded(self.client.srem(self._drained, server_id))

    async def drained(self) -> frozenset[str]:
        return frozenset(name.decode() for name in await guarded(self.client.smembers(self._drained)))

    async def _set(self, **fields: int) -> None:
        await guarded(self.client.hset(self._counters, mapping=fields))
