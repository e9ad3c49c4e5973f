"""The fleet: which rollout servers exist, their state in the weight group, and the version each serves.

Redis holds one record per server. These are the states, and who moves a server between them:

    JOINING ──(server: engine is up)──► STALE ──(server: loaded the current version)──► READY
    READY   ──(publisher: announced)──► LOADING ──(publisher: committed)──► READY
    any     ──(publisher: missed a deadline or failed)──► EVICTED ──(server: sees it, reloads)──► STALE
    READY, LOADING ──(server: behind the published version, or held at another)──► STALE

A server that ends leaves. One that died stays, with its last heartbeat, until the learner forgets it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast

import redis.asyncio as redis

from penstock.records import read_known_fields
from penstock.store.keys import RunKeys
from penstock.store.redis_errors import guarded
from penstock.store.scripts import STORE, read_record, read_rows

ServerState = Literal["JOINING", "READY", "LOADING", "STALE", "EVICTED"]
SERVING_STATES: tuple[ServerState, ...] = ("READY", "LOADING")


@dataclass(frozen=True)
class ServerRecord:
    """A rollout server's report of itself, and its state."""

    server_id: str
    address: str
    """host:port of its internal gRPC listener."""
    engine: str
    state: ServerState = "JOINING"
    policy_version: int = -1
    weights_digest: str = ""
    """Digest of the weights as the server received them. It equals the policy's digest exactly when every byte does.
    Empty while the server serves the model folder."""
    devices: tuple[str, ...] = ("cpu",)
    """Where each worker of its engine holds the weights: `cpu`, or a GPU's UUID."""
    host_id: str = ""
    """Equal for processes that can map each other's memory (penstock.weights.transports)."""
    transports: tuple[str, ...] = ("gloo", "snapshot")
    """Transports by which it can receive weights."""
    nccl_version: str = ""
    """Version of its NCCL library. Empty if it cannot receive by `nccl`."""
    running_groups: int = 0
    scoring_groups: int = 0
    """Part of the running groups: their samples are finished and are being scored."""
    running_requests: int = 0
    waiting_requests: int = 0
    """Requests that wait inside the engine."""
    kv_cache_usage: float = 0.0
    """0 to 1."""
    heartbeat_age_ms: int = 0
    """Time since its last heartbeat when the record was read, by Redis' clock."""


@dataclass(frozen=True)
class Reported:
    """What a server learns from its heartbeat."""

    state: ServerState | None
    """None once the server was removed, EVICTED when it must reload."""
    held_version: int | None
    """The version that the whole run is held at, or else the one that this server is pinned to."""
    current_version: int = 0
    """The version that was published last; 0, the model folder, before the first."""


class Fleet:
    """Registry of the rollout servers of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.keys = RunKeys(run)

    async def join(self, record: ServerRecord) -> None:
        await self.report(record)
        await self.set_state(record.server_id, "JOINING")

    async def report(self, record: ServerRecord) -> Reported:
        """Store a server's heartbeat. It is one call, because every server makes it twice a second."""
        fields = asdict(record)
        del fields["state"], fields["heartbeat_age_ms"]
        answer = read_record(await self._call("report_server", record.server_id, json.dumps(fields)))
        state, held = answer["state"], answer["held_version"]
        return Reported(
            cast("ServerState", state.decode()) if state else None,
            int(held) if held else None,
            int(answer["current_version"] or 0),
        )

    async def set_state(self, server_id: str, state: ServerState, term: int | None = None) -> None:
        """Move a server to a state. A publisher gives its term: the call raises Fenced and changes nothing once a newer
        term was taken, and it does nothing for a server that has left."""
        await self.set_states([server_id], state, term)

    async def set_states(self, server_ids: Sequence[str], state: ServerState, term: int | None = None) -> None:
        """`set_state` for many servers in one call, so that a push to a large fleet does not wait for each."""
        if server_ids:
            await self._call("set_server_state", state, "" if term is None else term, *server_ids)

    async def leave(self, server_id: str) -> None:
        """Forget a server, with its breaker and its quarantine."""
        await self._call("leave_server", server_id)

    async def forget_silent(self, max_silence_s: float, term: int) -> dict[str, float]:
        """Forget the servers that sent no heartbeat for `max_silence_s`. Returns the silence of each in seconds. Raises
        Fenced once a newer term was taken."""
        rows = read_rows(await self._call("forget_silent_servers", term, int(1000 * max_silence_s)))
        return {row["server_id"].decode(): row["silence_ms"] / 1000 for row in rows}

    async def servers(self) -> list[ServerRecord]:
        records = await guarded(self.client.hgetall(self.keys.servers))
        states = await guarded(self.client.hgetall(self.keys.server_states))
        now_ms = await self._now_ms()
        return [_read(json.loads(text), states.get(server_id), now_ms) for server_id, text in sorted(records.items())]

    async def num_servers(self) -> int:
        return int(await guarded(self.client.hlen(self.keys.servers)))

    async def num_changes(self) -> int:
        """How often a server joined, left, or changed its state or version."""
        return int(await guarded(self.client.hget(self.keys.counters, "fleet_changes")) or 0)

    async def quarantined(self) -> frozenset[str]:
        """Servers whose samples must not be used: see penstock.store.quarantine."""
        return frozenset(server.decode() for server in await guarded(self.client.hgetall(self.keys.quarantined)))

    async def term(self) -> int:
        """Term of the learner that may publish; 0 before the first learner."""
        return int(await guarded(self.client.hget(self.keys.counters, "term")) or 0)

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await STORE.call(self.client, self.keys.prefix, name, *arguments)

    async def _now_ms(self) -> int:
        seconds, microseconds = await guarded(self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000


def _read(fields: dict[str, Any], state: bytes | None, now_ms: int) -> ServerRecord:
    """A stored record, with its state and the age of its heartbeat."""
    fields["heartbeat_age_ms"] = max(0, now_ms - fields["heartbeat_ms"])
    fields["state"] = (state or b"JOINING").decode()
    return read_known_fields(ServerRecord, fields)
