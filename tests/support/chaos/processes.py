"""The processes of a chaos run. Each is started, killed, suspended and ended by its id, and has its own log."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from penstock_tools.local.private_redis import find_redis_server
from support.forked_process import ForkedProcess
from support.redis_server import RedisProcess

LOSS_WINDOW_S = 1.0
"""With `appendfsync everysec`, a machine that goes down may lose this much."""


class Child:
    """One process that can be killed and started again."""

    def __init__(self, name: str, module: str, arguments: list[str], folder: Path) -> None:
        self.name = name
        self.module, self.arguments = module, arguments
        self.log = folder / f"{name}.log"
        self.process: ForkedProcess | None = None
        self.is_expected_to_die = False
        self._log_start = 0

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        self.is_expected_to_die = bool(environment)
        with self.log.open("a") as output:
            self._log_start = output.tell()
        self.process = ForkedProcess(self.module, self.arguments, self.log, environment or {})

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while the process runs. It must have been started."""
        assert self.process is not None
        return self.process.poll()

    def kill(self) -> None:
        if self.process is not None:
            self.is_expected_to_die = True
            self.process.kill()
            self.process.wait(timeout=60)

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def log_since_start(self) -> str:
        return self.log.read_bytes()[self._log_start :].decode()

    def last_words(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""


class LosingRedis(RedisProcess):
    """Redis on a machine that may go down. Call `sample` often: `cut_tail` must know what may not be on disk yet."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder)
        self.folder = folder
        self.random = random.Random(seed)
        self._sizes: deque[tuple[float, int]] = deque()

    def sample(self) -> None:
        now = time.monotonic()
        with contextlib.suppress(FileNotFoundError):
            self._sizes.append((now, self._log_file.stat().st_size))
        self._forget_before(now - LOSS_WINDOW_S)

    def kill(self) -> None:
        super().kill()
        self._forget_before(time.monotonic() - LOSS_WINDOW_S)  # the last sample may be older than it was meant to be

    def _forget_before(self, time_s: float) -> None:
        while self._sizes and self._sizes[0][0] < time_s:
            self._sizes.popleft()

    def cut_tail(self) -> int:
        """Cut off some of what was written in the last second before the kill. Returns the number of bytes."""
        assert self.process is None, "kill it first"
        size = self._log_file.stat().st_size
        num_unsafe = max(0, size - self._sizes[0][1]) if self._sizes else 0
        num_lost = self.random.randint(0, num_unsafe)
        os.truncate(self._log_file, size - num_lost)
        self._sizes.clear()
        self._repair()
        return num_lost

    def _repair(self) -> None:
        """Repair the log, as an operator has to after a power cut. Redis drops a torn transaction when it starts. If
        the cut is inside a command, Redis keeps the beginning of the command in its log and replays it at the next
        start (valkey#4342)."""
        manifest = self.folder / "appendonlydir" / "appendonly.aof.manifest"
        log = manifest if manifest.exists() else self._log_file
        # The server binary is also the checking tool, depending on the name it is called by.
        subprocess.run(
            ["redis-check-aof", "--fix", str(log)],
            executable=find_redis_server(), input=b"y\n", stdout=subprocess.DEVNULL, check=True, timeout=60,
        )  # fmt: skip

    @property
    def _log_file(self) -> Path:
        """The file to which Redis appends. Since Redis 7 it is one of several."""
        parts = sorted(self.folder.glob("appendonlydir/*.incr.aof"))
        return parts[-1] if parts else self.folder / "appendonly.aof"
