"""The fleet: which rollout servers exist, their state in the weight group, and the version each serves.

Kept in Redis, one record a server. States, and who moves them:

    JOINING ──(server: engine is up)──► STALE ──(server: loaded the current version)──► READY
    READY   ──(publisher: announced)──► LOADING ──(publisher: committed)──► READY
    any     ──(publisher: missed a deadline or failed)──► EVICTED ──(server: sees it, reloads)──► STALE

`generation` grows whenever a server joins, leaves or changes between serving and not.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import redis.asyncio as redis

from penstock.replay.redis_queue import key_prefix

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
    running_groups: int = 0
    heartbeat_ms: int = 0

    @property
    def heartbeat_age_ms(self) -> int:
        return max(0, int(time.time() * 1000) - self.heartbeat_ms)


class Fleet:
    """Registry of the servers of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.prefix = key_prefix(run)
        self._records = f"{self.prefix}servers"
        self._states = f"{self.prefix}server_states"

    async def join(self, record: ServerRecord) -> None:
        await self.report(record)
        await self.set_state(record.server_id, "JOINING")

    async def report(self, record: ServerRecord) -> ServerState | None:
        """A server's heartbeat. Returns its state: None once it was removed, EVICTED when it must reload."""
        fields = asdict(record) | {"heartbeat_ms": int(time.time() * 1000)}
        del fields["state"]
        await self.client.hset(self._records, record.server_id, json.dumps(fields))
        state = await self.client.hget(self._states, record.server_id)
        return cast("ServerState", state.decode()) if state else None

    async def set_state(self, server_id: str, state: ServerState) -> None:
        before = await self.client.hget(self._states, server_id)
        await self.client.hset(self._states, server_id, state)
        was_serving = before is not None and before.decode() in SERVING_STATES
        if was_serving != (state in SERVING_STATES):
            await self.client.incr(f"{self.prefix}generation")

    async def leave(self, server_id: str) -> None:
        await self.client.hdel(self._states, server_id)
        await self.client.hdel(self._records, server_id)
        await self.client.incr(f"{self.prefix}generation")

    async def servers(self) -> list[ServerRecord]:
        records = await self.client.hgetall(self._records)
        states = await self.client.hgetall(self._states)
        return [
            ServerRecord(**json.loads(text), state=cast("ServerState", states.get(server_id, b"JOINING").decode()))
            for server_id, text in sorted(records.items())
        ]

    async def generation(self) -> int:
        return int(await self.client.get(f"{self.prefix}generation") or 0)
