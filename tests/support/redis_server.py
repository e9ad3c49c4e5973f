"""A real Redis that a test may kill and start again, and one with the users of users.acl."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.machine import free_port, wait_for_port
from penstock_tools.local.private_redis import find_redis_server, write_config

START_S = 120.0
"""On a busy machine even a small process may start late."""


class RedisProcess:
    """A real Redis that a test may kill and start again."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.config, self.url = write_config(folder, self.port)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        self.process = subprocess.Popen(
            [find_redis_server(), str(self.config), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        assert wait_for_port("127.0.0.1", self.port, timeout_s=START_S), "Redis did not start"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=100)
            self.process = None


async def num_commands(client: Any) -> int:
    """How many commands Redis has run, including those of scripts."""
    statistics = await client.info("commandstats")
    return sum(entry["calls"] for name, entry in statistics.items() if name != "cmdstat_info")


SCRIPTS = Path(__file__).parents[2] / "deploy" / "redis"


@contextmanager
def redis_with_users(folder: Path, passwords: Mapping[str, str]) -> Iterator[int]:
    """Start Redis with the contents of each role's password file. Yields its port."""
    port = free_port()
    for role, password in passwords.items():
        (folder / f"redis-{role}-password").write_text(password)
    process = subprocess.Popen(
        [
            "sh", str(SCRIPTS / "start.sh"), str(SCRIPTS / "users.acl"), str(folder), str(folder),
            "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
        ],
        env=os.environ | {"REDIS_SERVER": find_redis_server()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert wait_for_port("127.0.0.1", port, timeout_s=START_S), "Redis did not start"
        yield port
    finally:
        process.kill()
        process.wait(timeout=100)
