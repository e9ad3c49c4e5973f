"""The policy registry: one record for every version a run has published, and what operators made of it.

A record is written by the learner's publish call, in one step with the version becoming current, and never changes.
Marks stand beside it: which version is promoted, which are retired, and what is pinned to which.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import redis.asyncio as redis

from penstock.errors import NotFound
from penstock.replay.redis_queue import key_prefix
from penstock.store.redis_errors import guarded
from penstock.v1 import policies_pb2


class PolicyRegistry:
    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.prefix = key_prefix(run)

    async def get(self, policy_version: int | None = None) -> policies_pb2.Policy:
        """The record of a version, or of the current one."""
        if policy_version is None:
            current = await guarded(self.client.hget(f"{self.prefix}counters", "policy_version"))
            if current is None:
                raise NotFound("no policy version was published yet; the learner has not started")
            policy_version = int(current)
        record = await guarded(self.client.hget(f"{self.prefix}policies", policy_version))
        if record is None:
            raise NotFound(f"policy version {policy_version} was never published")
        policy: policies_pb2.Policy = policies_pb2.Policy.FromString(record)
        return policy

    async def newest_first(self, before: int | None, limit: int) -> list[policies_pb2.Policy]:
        """Up to `limit` records with a version below `before` (None: from the newest)."""
        top = "+inf" if before is None else f"({before}"
        versions = await guarded(
            self.client.zrevrangebyscore(f"{self.prefix}policy_versions", top, "-inf", start=0, num=limit)
        )
        if not versions:
            return []
        records = await guarded(self.client.hmget(f"{self.prefix}policies", versions))
        return [policies_pb2.Policy.FromString(record) for record in records if record is not None]

    # ── marks ──

    async def add_marks(self, policies: Iterable[policies_pb2.Policy]) -> None:
        """Fill in state, pins and whether servers are held there."""
        promoted, held = await guarded(
            self.client.hmget(f"{self.prefix}counters", ("promoted_version", "held_version"))
        )
        retired = {int(version) for version in await guarded(self.client.smembers(f"{self.prefix}retired_versions"))}
        pins = await self.pins()
        for policy in policies:
            version = policy.policy_version
            if version in retired:
                policy.state = policies_pb2.Policy.RETIRED
            elif promoted and int(promoted) == version:
                policy.state = policies_pb2.Policy.PROMOTED
            policy.is_held = bool(held) and int(held) == version
            policy.pins[:] = sorted(name for name, pinned in pins.items() if pinned == version)

    async def promote(self, policy_version: int) -> None:
        await guarded(self.client.hset(f"{self.prefix}counters", "promoted_version", policy_version))

    async def retire(self, policy_version: int) -> None:
        await guarded(self.client.sadd(f"{self.prefix}retired_versions", policy_version))

    async def pin(self, name: str, policy_version: int) -> None:
        await guarded(self.client.hset(f"{self.prefix}policy_pins", name, policy_version))

    async def unpin(self, name: str) -> bool:
        return bool(await guarded(self.client.hdel(f"{self.prefix}policy_pins", name)))

    async def pins(self) -> dict[str, int]:
        fields = await guarded(self.client.hgetall(f"{self.prefix}policy_pins"))
        return {name.decode(): int(version) for name, version in fields.items()}

    async def pinned_version(self, name: str) -> int | None:
        version = await guarded(self.client.hget(f"{self.prefix}policy_pins", name))
        return int(version) if version else None

    async def kept_versions(self) -> set[int]:
        """Versions whose snapshots may still be asked for."""
        fields = ("promoted_version", "held_version", "roll_back_version")
        marked = await guarded(self.client.hmget(f"{self.prefix}counters", fields))
        return {int(version) for version in marked if version} | set((await self.pins()).values())
