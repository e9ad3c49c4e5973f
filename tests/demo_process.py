"""Runs `penstock demo` in a separate process, as a newcomer starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from live_processes import is_alive

ROOT = Path(__file__).parents[1]
DEADLINE_S = 240


class DemoProcess:
    """`penstock demo` in a separate process. All processes that it started are ended with it, whatever happens."""

    def __init__(self, folder: Path, *overrides: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        command = [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "demo",
            "--run_dir",
            str(folder),
            "--run",
            "t",
            *overrides,
        ]
        self.folder = folder / "t"
        self.output = folder / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
            )
        self.seen: dict[int, psutil.Process] = {}

    def descendants(self) -> list[psutil.Process]:
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen |= {process.pid: process for process in found}
        return found

    def wait(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            self.descendants()
            time.sleep(0.2)
        return self.process.returncode

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        metrics = self.folder / "metrics.jsonl"
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= step):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            self.descendants()
            time.sleep(0.1)

    def orphans(self) -> list[str]:
        """Processes started by the demo that are still alive. A process that is just ending gets a moment."""
        alive = [process for process in self.seen.values() if is_alive(process)]
        _, alive = psutil.wait_procs(alive, timeout=5)
        return [" ".join(process.cmdline()[:4]) for process in alive if is_alive(process)]

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        for process in [*self.descendants(), *self.seen.values()]:
            if is_alive(process):
                process.kill()
        self.process.kill()
        self.process.wait()
