"""The fleet: which rollout servers exist, their state in the weight group, and the version each serves.

Kept in Redis, one record a server. States, and who moves them:

    JOINING ──(server: engine is up)──► STALE ──(server: loaded the current version)──► READY
    READY   ──(publisher: announced)──► LOADING ──(publisher: committed)──► READY
    any     ──(publisher: missed a deadline or failed)──► EVICTED ──(server: sees it, reloads)──► STALE

`generation` grows whenever a server joins, leaves or changes between serving and not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import redis.asyncio as redis

from penstock.replay.redis_queue import key_prefix
from penstock.store.redis_errors import guarded

# A full Redis lets a script through that begins with a delete: a fleet must not fall apart over memory.
_HSET = "redis.call('HDEL', KEYS[1], '') return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"
_SET_STATE = """
local current = redis.call('HGET', KEYS[2], 'term') or '0'
if ARGV[3] ~= '' and tonumber(ARGV[3]) ~= tonumber(current) then
  return redis.error_reply('FENCED term ' .. ARGV[3] .. ' has passed; the current one is ' .. current)
end
if ARGV[3] ~= '' and redis.call('HEXISTS', KEYS[3], ARGV[1]) == 0 then
  return 0
end
redis.call('HDEL', KEYS[1], '')
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
_INCREMENT = "redis.call('HDEL', KEYS[2], '') return redis.call('INCRBY', KEYS[1], 1)"

ServerState = Literal["JOINING", "READY", "LOADING", "STALE", "EVICTED"]
SERVING_STATES: tuple[ServerState, ...] = ("READY", "LOADING")


@dataclass(frozen=True)
class ServerRecord:
    server_id: str
    address: str
    """host:port of its internal gRPC listener."""
    engine: str
    state: ServerState = "JOINING"
    policy_version: int = -1
    weights_digest: str = ""
    """Of the version as the server received it; equal to the policy's exactly when every byte is. Empty: the version is
    the model folder."""
    devices: tuple[str, ...] = ("cpu",)
    """Where each worker of its engine holds the weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Equal on processes that can map each other's memory (penstock.weights.transports)."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """What it can receive weights by."""
    running_groups: int = 0
    heartbeat_age_ms: int = 0
    """By Redis' clock, when the record was read."""


class Fleet:
    """Registry of the servers of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.prefix = key_prefix(run)
        self._records = f"{self.prefix}servers"
        self._states = f"{self.prefix}server_states"
        self._counters = f"{self.prefix}counters"

    async def join(self, record: ServerRecord) -> None:
        await self.report(record)
        await self.set_state(record.server_id, "JOINING")

    async def report(self, record: ServerRecord) -> ServerState | None:
        """A server's heartbeat. Returns its state: None once it was removed, EVICTED when it must reload."""
        fields = asdict(record) | {"heartbeat_ms": await self._now_ms()}
        del fields["state"], fields["heartbeat_age_ms"]
        await self._set(self._records, record.server_id, json.dumps(fields))
        state = await guarded(self.client.hget(self._states, record.server_id))
        return cast("ServerState", state.decode()) if state else None

    async def set_state(self, server_id: str, state: ServerState, term: int | None = None) -> None:
        """Move a server. A publisher gives its term: raises Fenced, and changes nothing, once that has passed; and it
        moves no server that has left meanwhile."""
        before = await guarded(self.client.hget(self._states, server_id))
        keys = (self._states, self._counters, self._records)
        await guarded(self.client.eval(_SET_STATE, 3, *keys, server_id, state, "" if term is None else term))
        was_serving = before is not None and before.decode() in SERVING_STATES
        if was_serving != (state in SERVING_STATES):
            await self._next_generation()

    async def leave(self, server_id: str) -> None:
        await guarded(self.client.hdel(self._states, server_id))
        await guarded(self.client.hdel(self._records, server_id))
        await self._next_generation()

    async def servers(self) -> list[ServerRecord]:
        records = await guarded(self.client.hgetall(self._records))
        states = await guarded(self.client.hgetall(self._states))
        now_ms = await self._now_ms()
        servers = []
        for server_id, text in sorted(records.items()):
            fields = json.loads(text)
            age_ms = max(0, now_ms - fields.pop("heartbeat_ms"))
            fields |= {name: tuple(fields[name]) for name in ("devices", "transports")}
            state = cast("ServerState", states.get(server_id, b"JOINING").decode())
            servers.append(ServerRecord(**fields, state=state, heartbeat_age_ms=age_ms))
        return servers

    async def term(self) -> int:
        """Of the learner that may publish; 0 before there was one."""
        return int(await guarded(self.client.hget(self._counters, "term")) or 0)

    async def generation(self) -> int:
        return int(await guarded(self.client.get(f"{self.prefix}generation")) or 0)

    async def _set(self, key: str, field: str, value: str) -> None:
        await guarded(self.client.eval(_HSET, 1, key, field, value))

    async def _next_generation(self) -> None:
        await guarded(self.client.eval(_INCREMENT, 2, f"{self.prefix}generation", self._states))

    async def _now_ms(self) -> int:
        seconds, microseconds = await guarded(self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000
