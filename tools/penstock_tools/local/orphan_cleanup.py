"""Ends the processes of a run whose supervisor was killed.

The supervisor starts this process first and tells it its children through a pipe, which ends without `done` if it was
killed. Then every session of a child gets SIGTERM, some time, and SIGKILL; Redis comes last, so that the others can
still return their prompts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import psutil

GRACE_S = 15.0
"""How long children have to stop after SIGTERM, and Redis after them."""
KILL_S = 10.0
POLL_S = 0.1


class OrphanCleanup:
    """The supervisor's side of the pipe."""

    def __init__(self, log: Path, held_file: IO[str] | None, grace_s: float) -> None:
        """`held_file` stays open, and its lock held, until the last process of the run has ended."""
        self._known: set[int] = set()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(grace_s)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if held_file is None else (held_file.fileno(),),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def add(self, pid: int, *, is_last: bool) -> None:
        self._known.add(pid)
        self._tell({"add": pid, "is_last": is_last})

    def forget(self, pid: int) -> None:
        """Tell it about a child that has ended. Its process id may be used again."""
        if pid in self._known:
            self._known.discard(pid)
            self._tell({"forget": pid})

    def close(self) -> None:
        """Tell it that every process has ended, and wait for its own end."""
        try:
            self._process.communicate(b'{"done": true}\n', KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KILL_S)

    def _tell(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and the run goes on without it
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()


def left_over(messages: Iterable[bytes]) -> dict[int, bool]:
    """Follow the supervisor's messages to their end. Returns the children that are left, each a leader of a session,
    with whether it ends last. None is left if the supervisor has reported that all is done."""
    children: dict[int, bool] = {}
    for line in messages:
        try:
            message = json.loads(line)
        except ValueError:
            continue  # the supervisor was killed while it wrote
        if "done" in message:
            return {}
        if "add" in message:
            children[message["add"]] = message["is_last"]
        else:
            children.pop(message["forget"], None)
    return children


def end(leaders: set[int], grace_s: float) -> None:
    """End all processes in the sessions of the leaders."""
    for pid in leaders:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := _alive_in(leaders)) and (passed_s := time.monotonic() - deadline) < KILL_S:
        if passed_s >= 0:
            print(f"killing {left}, which did not stop in {grace_s:g} s", flush=True)
            for pid in left:
                _signal(pid, signal.SIGKILL)
        time.sleep(POLL_S)


def _alive_in(leaders: set[int]) -> list[int]:
    """The processes in the leaders' sessions. A zombie has ended."""
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if not is_zombie and os.getsid(process.pid) in leaders:
                found.append(process.pid)
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    children = left_over(sys.stdin.buffer)
    for is_last in (False, True):
        end({pid for pid in children if children[pid] is is_last}, float(sys.argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
