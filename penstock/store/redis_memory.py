"""Memory that Redis uses, and how much it may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio.cluster import RedisCluster
from redis.exceptions import NoPermissionError, ResponseError

from penstock.store.keys import RunKeys
from penstock.store.redis_client import RedisClient


@dataclass(frozen=True)
class RedisMemory:
    used_bytes: int
    limit_bytes: int
    """`maxmemory`, or the memory of its machine if there is no such limit."""


async def read_redis_memory(client: RedisClient, keys: RunKeys) -> RedisMemory | None:
    """Read the memory of the Redis, or of the shard, that holds a run. None if this user may not call INFO."""
    try:
        if isinstance(client, RedisCluster):
            node = client.get_node_from_key(keys.counters)
            info: dict[str, Any] = await client.execute_command("INFO", "memory", target_nodes=node)
        else:
            asked: Any = client.info("memory")
            info = await asked
    except (NoPermissionError, ResponseError):
        return None
    limit = int(info.get("maxmemory", 0)) or int(info.get("total_system_memory", 0))
    return RedisMemory(int(info["used_memory"]), limit)
