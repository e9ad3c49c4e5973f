"""Checks of Redis: version, durability, memory and clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError

from penstock.config.run import RunConfig
from penstock.doctor.finding import Finding
from penstock.machine.disk_space import measure_disk
from penstock.store.redis_client import RedisClient

MIN_REDIS = (6, 2)
EVERYSEC_LOSS_S = 2.0
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0


async def check_redis(client: RedisClient, config: RunConfig) -> list[Finding]:
    """Check that Redis answers, is new enough, writes to disk and does not evict keys."""
    asked: Any = client.info()
    try:
        info: dict[str, Any] = await asked
    except (NoPermissionError, ResponseError) as error:
        advice = "use a redis.url with the operator's user"
        return [Finding("redis", "warn", f"this user may not run INFO ({error})", advice)]
    except AuthenticationError as error:
        advice = "correct redis.url or redis.password_file"
        return [Finding("redis", "fail", f"refuses the user or password ({error})", advice)]
    except (RedisError, OSError) as error:
        return [
            Finding("redis", "fail", f"does not answer ({error})", "check redis.url and that the server is running")
        ]
    fsync = await _setting(client, "appendfsync")
    findings = [_version(info), _durability(info, fsync, config.replay.settle_s), _memory(info)]
    return findings + _disk(config, await _setting(client, "dir"))


def _version(info: dict[str, Any]) -> Finding:
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_REDIS:
        return Finding("redis", "fail", f"version {version} is too old", "upgrade to 6.2 or newer")
    return Finding("redis", "ok", f"version {version}")


def _durability(info: dict[str, Any], fsync: str, settle_s: float) -> Finding:
    name = "durability"
    if not info.get("aof_enabled"):
        return Finding(name, "fail", "no append-only file: a restart loses the queue", "set appendonly yes")
    if info.get("aof_last_write_status", "ok") != "ok":
        return Finding(
            name, "fail", "the last write of the append-only file failed", "free disk space on the Redis machine"
        )
    if fsync == "no":
        return Finding(name, "warn", "appendfsync no: a crash may lose 30 s of writes", "set appendfsync everysec")
    if fsync == "everysec" and settle_s < EVERYSEC_LOSS_S:
        text = f"append-only file, fsync every second, and replay.settle_s is {settle_s:g}"
        return Finding(
            name, "warn", text, "set replay.settle_s to 2, so that a crash of the Redis machine loses nothing"
        )
    return Finding(name, "ok", f"append-only file, fsync {fsync or 'unknown'}")


def _memory(info: dict[str, Any]) -> Finding:
    policy, limit, used = info.get("maxmemory_policy", ""), int(info.get("maxmemory", 0)), int(info["used_memory"])
    if limit and policy != "noeviction":
        return Finding("memory", "fail", f"{policy} may evict prompts and groups", "set maxmemory-policy noeviction")
    if limit and used > 0.9 * limit:
        text = f"{used / limit:.0%} of maxmemory is used"
        return Finding("memory", "warn", text, "raise maxmemory, or lower replay.capacity_bytes")
    return Finding("memory", "ok", f"{used / 2**20:.0f} MiB used, {policy or 'no limit'}")


def _disk(config: RunConfig, folder: str) -> list[Finding]:
    """Check the space for the append-only file, if Redis runs on this machine. A Redis whose disk is full refuses all
    writes."""
    url = urlsplit(config.redis.url)
    is_here = url.scheme == "unix" or url.hostname in ("localhost", "127.0.0.1", "::1")
    if not is_here or not folder or not Path(folder).is_dir():
        return []
    space = measure_disk(Path(folder))
    if space.is_low:
        return [Finding("disk", "warn", f"{space}, the folder of Redis", "free space, before Redis refuses writes")]
    return [Finding("disk", "ok", f"{space}, the folder of Redis")]


async def _setting(client: RedisClient, name: str) -> str:
    """Value of a setting; empty if this user or a managed Redis does not allow CONFIG GET."""
    asked: Any = client.config_get(name)
    try:
        found = await asked
    except RedisError:
        return ""
    value = found.get(name, found.get(name.encode(), ""))
    return value.decode() if isinstance(value, bytes) else str(value)


async def check_clock(client: RedisClient) -> Finding:
    """Compare this machine's clock with Redis'. Leases use Redis' clock only; ages of groups and traces use both."""
    asked: Any = client.time()
    started = time.time()
    seconds, microseconds = await asked
    offset_s = int(seconds) + int(microseconds) / 1e6 - (started + time.time()) / 2
    text = f"this clock is {abs(offset_s):.2f} s {'behind' if offset_s > 0 else 'ahead of'} that of Redis"
    if abs(offset_s) < CLOCK_WARN_S:
        return Finding("clock", "ok", text)
    return Finding(
        "clock", "fail" if abs(offset_s) >= CLOCK_FAIL_S else "warn", text, "synchronise this machine's clock (NTP)"
    )
