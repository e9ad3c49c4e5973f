"""Processes under test: `penstock demo`, waits for their changes, their probes, and the sockets that they listen on."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import psutil

POLL_S = 0.1
LISTING_S = 1.0
"""How often the descendants of a process are listed while it works. To list them reads every process of the machine."""
T = TypeVar("T")


def until(found: Callable[[], T], about: str, timeout_s: float = 120) -> T:
    """Call `found` until its result is true, and return the result. Fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {about}"
        time.sleep(POLL_S)
    return result


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_running(pid: int) -> bool:
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def command_of(process: psutil.Process) -> list[str]:
    """The words of its command; none once it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def listeners(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """The addresses on which the processes accept TCP connections, each with the command of its process."""
    found = {}
    for process in processes:
        try:
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host, port = connection.laddr
                    found[f"{host} {port}"] = " ".join(command_of(process)).strip()[:120]
        except psutil.NoSuchProcess:
            continue
    return found


def beyond_loopback(found: dict[str, str]) -> dict[str, str]:
    return {address: command for address, command in found.items() if not _is_loopback(address.split()[0])}


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def probe(port: int, path: str = "/readyz") -> tuple[int, dict[str, Any]] | None:
    """The status and the answer; None while nobody listens, or if the process ends before it has answered."""
    answer: Any
    try:
        try:
            answer = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60)
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            return answer.status, json.load(answer)
    except (OSError, http.client.HTTPException):
        return None


class SeenStates(list[str]):
    """The states that a process was seen in, without repetitions."""

    def probe(self, port: int) -> str:
        """Probe the process once, and return the newest state. Only a ready process may answer with 200."""
        answer = probe(port)
        if answer is not None:
            assert (answer[0] == 200) == (answer[1]["state"] == "ready")
            if self[-1:] != [answer[1]["state"]]:
                self.append(answer[1]["state"])
        return self[-1] if self else ""


ROOT = Path(__file__).parents[2]
DEADLINE_S = 480
"""For a start or an end. On a busy machine a start takes minutes."""


class DemoProcess:
    """`penstock demo`, or another command of the same run, in a separate process. All processes that it started are
    ended with it, whatever happens."""

    def __init__(
        self, folder: Path, *overrides: str, environment: Mapping[str, str] = MappingProxyType({}),
        words: Sequence[str] = ("demo",),
    ) -> None:  # fmt: skip
        run = ["--run_dir", str(folder), "--run", "t"]
        command = [sys.executable, "-m", "penstock.cli.main", *words, *run, *overrides]
        self.folder = folder / "t"
        self.output = folder / f"output-{words[0]}.txt"
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
        deadline, listed_at = time.monotonic() + DEADLINE_S, -LISTING_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.text()
            if time.monotonic() > listed_at + LISTING_S:
                listed_at = time.monotonic()
                self.descendants()
            time.sleep(POLL_S)
        return self.process.returncode

    def wait_for_step(self, step: int) -> None:
        deadline, listed_at = time.monotonic() + DEADLINE_S, -LISTING_S
        metrics = self.folder / "metrics.jsonl"
        while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= step):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            if time.monotonic() > listed_at + LISTING_S:
                listed_at = time.monotonic()
                self.descendants()
            time.sleep(0.1)

    def orphans(self) -> list[str]:
        """Processes started by the demo that are still alive. A process that is just ending gets time to."""
        alive = [process for process in self.seen.values() if is_alive(process)]
        _, alive = psutil.wait_procs(alive, timeout=30)
        return [" ".join(command_of(process)[:4]) for process in alive if is_alive(process)]

    def text(self) -> str:
        return self.output.read_text()

    def end(self) -> None:
        for process in [*self.descendants(), *self.seen.values()]:
            if is_alive(process):
                process.kill()
        self.process.kill()
        self.process.wait()
