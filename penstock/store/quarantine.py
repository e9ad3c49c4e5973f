"""Servers in quarantine: their log-probs disagree with the learner's, so nothing that they sampled is trained.

The learner moves a server through these phases. The server itself notices nothing: it leases less, and is sent a
version that it seems to have.

    serving ──(log-probs disagree)──► draining ──(weights loaded wholly)──► probed ──(probes agree)──► serving
                                         ▲                                    │
                                         └──────(probes disagree)─────────────┘

While it drains, it leases nothing. While it is probed, it leases a few prompts, whose groups are compared. A group that
it sampled in quarantine and that is no probe is expired: its prompt is leased again and loses no attempt.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import redis.asyncio as redis

from penstock.records import read_known_fields
from penstock.store.keys import RunKeys
from penstock.store.redis_errors import guarded
from penstock.store.scripts import STORE


@dataclass(frozen=True)
class Quarantine:
    """Why a server is in quarantine, and how far it is on its way back."""

    server_id: str
    mismatch_nats: float
    """Mean difference between its log-probs and the learner's when they were compared last."""
    limit_nats: float
    """The largest difference that would have been allowed."""
    policy_version: int
    """The learner's version when they were compared."""
    since_ms: int
    """When the quarantine began, by Redis' clock."""
    num_reloads: int = 0
    """How often its weights were loaded wholly since."""
    probes_left: int = 0
    """Prompts that it may still lease as probes. lease.lua counts them down."""
    probe_ids: frozenset[int] = field(default_factory=frozenset)
    """Prompts that it leased as probes. lease.lua adds them."""

    def to_json(self) -> str:
        """The stored form, which lease.lua reads and writes."""
        return json.dumps(asdict(self) | {"probe_ids": " ".join(map(str, sorted(self.probe_ids)))})

    @classmethod
    def from_json(cls, text: str | bytes) -> Quarantine:
        fields = json.loads(text)
        fields["probe_ids"] = frozenset(map(int, fields.get("probe_ids", "").split()))
        return read_known_fields(cls, fields)


class Quarantines:
    """The records of one run. Only the learner of the current term changes them."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.keys = RunKeys(run)

    async def read(self) -> dict[str, Quarantine]:
        """Every record, by server."""
        records = await guarded(self.client.hgetall(self.keys.quarantined))
        return {server.decode(): Quarantine.from_json(text) for server, text in sorted(records.items())}

    async def put(self, quarantine: Quarantine, term: int) -> None:
        """Store the record, unless the server has left. Raises Fenced once a newer term was taken."""
        await self._set(quarantine.server_id, quarantine.to_json(), term)

    async def end(self, server_id: str, term: int) -> None:
        """Remove the record. Raises Fenced once a newer term was taken."""
        await self._set(server_id, "", term)

    async def now_ms(self) -> int:
        seconds, microseconds = await guarded(self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def _set(self, server_id: str, record: str, term: int) -> None:
        await STORE.call(self.client, self.keys.prefix, "set_quarantine", term, server_id, record)
