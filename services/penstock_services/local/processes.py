"""Child processes of a local run, which are started, checked, started again and ended together.

On Linux this process adopts the orphans of its children (subreaper), so that no grandchild outlives the run. If this
process is killed, `orphan_cleanup.py` ends the children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from penstock.errors import ProcessDied
from penstock_services.local.orphan_cleanup import GRACE_S, OrphanCleanup

QUIET_S = 3.0
"""A child that takes longer than this to end is mentioned."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_timeout_s: float
    log_start: int = 0
    """Size of the log when the process was started. A restarted run appends to the same log."""
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    why_killed: str = ""
    """Why the supervisor has killed the process; empty if it has not."""

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP holds the process."""
        try:
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process. Some processes catch SIGTERM and exit with 128 + its number."""
        code = self.process.returncode
        return code is not None and (code < 0 or code > 128)

    def error(self) -> ProcessDied:
        """Describe in one line how the process ended, its last error message, and where its log is."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        how = self.why_killed or how
        said = last_error_line(self.log, self.log_start)
        return ProcessDied(f"{self.name} {how}{': ' + said if said else ''} (log: {self.log})")


def last_error_line(log: Path, start: int = 0) -> str:
    """Return the last error in a log after byte `start`, without its prefix; empty if there is none."""
    try:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    for line in reversed(lines[-200:]):
        if "error: " in line:
            return line.split("error: ", 1)[1].strip()
    for line in reversed(lines[-200:]):
        if "Error: " in line:
            return line.strip()
    return ""


class ProcessGroup:
    """All children of one run, in the order of their start."""

    def __init__(self, log_folder: Path, held_file: IO[str] | None = None, orphan_grace_s: float = GRACE_S) -> None:
        """`held_file` stays open, and its lock held, while a process of the run lives, even if this one is killed."""
        self.log_folder = log_folder
        self.held_file = held_file
        self.orphan_grace_s = orphan_grace_s
        self.on_wait: Callable[[str], None] = lambda _: None
        """Called with a line about a child that takes a while to end."""
        self.children: list[Child] = []
        self._cleanup: OrphanCleanup | None = None
        self._others = {process.pid for process in psutil.Process().children()}
        """Children that this process had before. They are none of the run's."""

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stop_timeout_s: float = 20,
        ends_last: bool = False,
    ) -> Child:
        """Start a child, which writes its output to `NAME.log`. From then on, this process adopts its orphans.

        If this process is killed, a child that `ends_last` ends after the others."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if self._cleanup is None:
            self._cleanup = OrphanCleanup(self.log_folder / "cleanup.log", self.held_file, self.orphan_grace_s)
        log = self.log_folder / f"{name}.log"
        with log.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if ends_last else _end_with_parent,  # noqa: PLW1509  (one system call, no lock)
                pass_fds=(self.held_file.fileno(),) if ends_last and self.held_file is not None else (),
                env={**os.environ, **(environment or {})},
            )
        self._cleanup.add(process.pid, is_last=ends_last)
        child = Child(name, process, log, stop_timeout_s, log_start, command, environment or {})
        self.children.append(child)
        return child

    def check(self, may_finish: Sequence[str] = ()) -> None:
        """Raise ProcessDied for the first child that has ended. Children in `may_finish` may end with code 0."""
        for child in self.ended(may_finish):
            raise child.error()

    def ended(self, may_finish: Sequence[str] = ()) -> list[Child]:
        """The children that have ended. Children in `may_finish` may end with code 0."""
        found = []
        for child in self.children:
            code = child.exit_code
            if code is None:
                continue
            self._forget(child)
            if code != 0 or child.name not in may_finish:
                found.append(child)
        self.reap_orphans()
        return found

    def start_again(self, child: Child) -> Child:
        """Start a child that has ended, and that does not end last, once more. What its process left behind is killed
        first: an engine, for example, still holds the memory of the GPU."""
        self._kill_session(child.process.pid)
        self.remove(child)
        return self.start(child.name, child.command, environment=child.environment, stop_timeout_s=child.stop_timeout_s)

    def kill(self, child: Child, why: str) -> None:
        """Kill a child that hangs, with its descendants. `why` follows its name in `Child.error`."""
        child.why_killed = why
        self._kill_tree(child.process.pid)

    def remove(self, child: Child) -> None:
        """Forget a child that has ended."""
        self.children.remove(child)
        self._forget(child)

    def _forget(self, child: Child) -> None:
        if self._cleanup is not None:
            self._cleanup.forget(child.process.pid)

    def reap_orphans(self) -> None:
        """Let the kernel forget adopted processes that have ended. They are in a child's session, which tells them from
        a process that another part of this program has started and waits for."""
        if sys.platform != "linux":
            return
        own = {child.process.pid for child in self.children} | ({self._cleanup.pid} if self._cleanup else set())
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ChildProcessError):
                if process.pid not in own and os.getsid(process.pid) != os.getsid(0):
                    os.waitpid(process.pid, os.WNOHANG)

    def stop(self) -> None:
        """End all children, newest first, each with its own deadline. Then kill the processes that they left behind."""
        for child in reversed(self.children):
            if child.exit_code is None:
                child.process.terminate()
                try:
                    self._wait_for_end(child)
                except subprocess.TimeoutExpired:
                    self._kill_tree(child.process.pid)
                    child.process.wait(10)
        self._kill_leftovers()
        if self._cleanup is not None:
            self._cleanup.close()
            self._cleanup = None

    def _wait_for_end(self, child: Child) -> None:
        quiet_s = min(QUIET_S, child.stop_timeout_s)
        try:
            child.process.wait(quiet_s)
        except subprocess.TimeoutExpired:
            self.on_wait(f"waiting for {child.name} to end, at most {child.stop_timeout_s:.0f} s (log: {child.log})")
            child.process.wait(child.stop_timeout_s - quiet_s)

    def _kill_tree(self, pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            for process in [*root.children(recursive=True), root]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _kill_session(self, leader: int) -> None:
        """Kill the descendants that are in the session of a child that has ended."""
        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(process.pid) == leader:
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, timeout=10)

    def _kill_leftovers(self) -> None:
        deadline = time.monotonic() + 10
        spared = self._others | ({self._cleanup.pid} if self._cleanup else set())
        while leftovers := [p for root in psutil.Process().children() if root.pid not in spared for p in _tree(root)]:
            for process in leftovers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(leftovers, timeout=2)
            if time.monotonic() > deadline:
                break


def _tree(root: psutil.Process) -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
