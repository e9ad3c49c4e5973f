"""A program that runs under a confinement: its input, output and end."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock_rollout.rewards.sandbox.limits import (
    ControlGroup,
    Limits,
    ProcessEntry,
    files_are_exceeded,
    memory_is_exceeded,
    read_processes,
)

FIRST_USER, NUM_USERS = 60000, 5000
"""Range of user ids without an account."""
READABLE = (
    sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent), "/usr", "/lib", "/lib64", "/bin",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random",
)  # fmt: skip
"""Paths that an interpreter needs to start and import. /proc, /home, /tmp and the rest of /etc stay closed."""
POLL_S = 0.05
ERROR_TAIL_BYTES = 4096
READ_BYTES = 65536
MEASURE_S = 0.2
"""How often the memory and the files of a running program are measured."""

Ending = Literal["itself", "deadline", "output", "memory", "files"]


class RunningProgram:
    """A program that has been started. What its processes and files use together is measured, unless the kernel holds
    the limit: it holds the memory if there is a control group, and the files if there is no `folder`."""

    def __init__(
        self, process: subprocess.Popen[bytes], limits: Limits, group: ControlGroup | None, folder: Path | None = None
    ) -> None:
        self.process = process
        """The process to wait for. Its standard streams are the program's."""
        self._limits = limits
        self._holds_memory = group is not None
        self._folder = folder

    def pids(self, processes: Mapping[int, ProcessEntry]) -> list[int]:
        """The ids of the program's processes."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill every process of the program and wait for their end. May be called again."""
        raise NotImplementedError

    def exceeded(self) -> Literal["memory", "files"] | None:
        """The limit that all processes or all files together exceed, if any."""
        if self._holds_memory and self._folder is None:
            return None
        processes = read_processes() if sys.platform == "linux" else {}
        pids = self.pids(processes)
        if not self._holds_memory and memory_is_exceeded(pids, processes, self._limits.memory_bytes):
            return "memory"
        if self._folder is not None and files_are_exceeded(self._folder, self._limits.folder_bytes, pids):
            return "files"
        return None


def start_process(command: Sequence[str], cwd: Path, home: Path, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a command with pipes, as the leader of a session. It sees no environment variables of this process."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=environment, start_new_session=True, **settings
    )


def own_user() -> int:
    """The user of the programs of a reward process that runs as root. It has no others, so that the process limit
    counts only these programs."""
    return FIRST_USER + os.getpid() % NUM_USERS


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    exit_code: int
    """Negative, or 128 and more under bubblewrap, if a signal ended the program."""
    stdout: bytes
    error_tail: bytes
    """The last ERROR_TAIL_BYTES of standard error."""
    ended: Ending
    """Why the program ended: it exited by itself, its time was up, it printed too much, or it exceeded its memory or
    the size of its files."""

    @property
    def succeeded(self) -> bool:
        return self.ended == "itself" and self.exit_code == 0


class ProgramIO:
    """The pipes of one program. It does not wait for descendants of the program that keep a pipe open."""

    def __init__(self, program: RunningProgram, stdin: bytes, output_bytes: int) -> None:
        process = program.process
        assert process.stdin and process.stdout and process.stderr
        self.program = program
        self._to_write = memoryview(stdin)
        self._output_bytes = output_bytes
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._written = bytearray()
        self._errors = b""

    def run(self, deadline: float) -> Outcome:
        """Feed and read the program until it ends or exceeds a limit, then kill all of it."""
        with selectors.DefaultSelector() as selector:
            for stream, event in (
                (self._stdin, selectors.EVENT_WRITE),
                (self._stdout, selectors.EVENT_READ),
                (self._stderr, selectors.EVENT_READ),
            ):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, event)
            ended = self._follow(selector, deadline)
        self.program.kill()
        return Outcome(self.program.process.returncode, bytes(self._written), self._errors, ended)

    def _follow(self, selector: selectors.BaseSelector, deadline: float) -> Ending:
        measures_at = time.monotonic() + MEASURE_S
        while True:
            has_ended = _has_ended(self.program.process)
            self._transfer(selector, 0 if has_ended else min(POLL_S, max(0.0, deadline - time.monotonic())))
            if len(self._written) > self._output_bytes:
                return "output"
            if has_ended:
                return "itself"
            if (now := time.monotonic()) >= deadline:
                return "deadline"
            if now >= measures_at:
                measures_at = now + MEASURE_S
                if (limit := self.program.exceeded()) is not None:
                    return limit

    def _transfer(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        """Read and write the bytes that are ready. Waits for some, up to `wait_s`."""
        if not selector.get_map():
            time.sleep(min(wait_s, 0.002))
            return
        for key, _ in selector.select(wait_s):
            if key.fileobj is self._stdin:
                self._feed(selector)
            else:
                self._read(selector, key.fd, is_output=key.fileobj is self._stdout)

    def _feed(self, selector: selectors.BaseSelector) -> None:
        try:
            self._to_write = self._to_write[os.write(self._stdin.fileno(), self._to_write[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._to_write = memoryview(b"")
        if not self._to_write:
            selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, selector: selectors.BaseSelector, descriptor: int, *, is_output: bool) -> None:
        """Read the bytes that are available, up to one chunk past the output limit."""
        while True:
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                selector.unregister(descriptor)
                return
            if is_output:
                self._written += chunk
                if len(self._written) > self._output_bytes:
                    return
            else:
                self._errors = (self._errors + chunk)[-ERROR_TAIL_BYTES:]
                return


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Check without reaping, so that the process id, which is also the group id, stays reserved until the kill."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
