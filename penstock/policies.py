"""The policy registry: one record for every version a run has published. Written by the learner, read by everyone."""

from __future__ import annotations

from typing import Any

import redis.asyncio as redis

from penstock.errors import NotFound
from penstock.redis_errors import guarded
from penstock.replay.redis_queue import key_prefix
from penstock.v1 import policies_pb2


class PolicyRegistry:
    """Reads only: a record is written by the learner's publish call, in one step with the version becoming current."""

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
