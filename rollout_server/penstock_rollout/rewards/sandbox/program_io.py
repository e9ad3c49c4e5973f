"""Feeds the standard input of a sandboxed program, reads its output within limits, and ends it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Literal

POLL_S = 0.05
ERROR_TAIL_BYTES = 4096
READ_BYTES = 65536


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    exit_code: int
    """Negative if a signal ended the program."""
    stdout: bytes
    error_tail: bytes
    """The last ERROR_TAIL_BYTES of standard error."""
    ended: Literal["itself", "deadline", "output"]
    """Why the program ended: it exited by itself, its time was up, or it printed too much."""

    @property
    def succeeded(self) -> bool:
        return self.ended == "itself" and self.exit_code == 0


class ProgramIO:
    """The pipes of one program. It does not wait for descendants of the program that keep a pipe open."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.process = process
        self._to_write = memoryview(stdin)
        self._output_bytes = output_bytes
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._written = bytearray()
        self._errors = b""

    def run(self, deadline: float) -> Outcome:
        """Feed and read the program until it ends, then kill its process group."""
        ended: Literal["itself", "deadline", "output"] = "itself"
        with selectors.DefaultSelector() as selector:
            for stream, event in (
                (self._stdin, selectors.EVENT_WRITE),
                (self._stdout, selectors.EVENT_READ),
                (self._stderr, selectors.EVENT_READ),
            ):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, event)
            while True:
                has_ended = _has_ended(self.process)
                self._transfer(selector, 0 if has_ended else min(POLL_S, max(0.0, deadline - time.monotonic())))
                if len(self._written) > self._output_bytes:
                    ended = "output"
                    break
                if has_ended:
                    break
                if time.monotonic() >= deadline:
                    ended = "deadline"
                    break
        kill_group(self.process)
        return Outcome(self.process.returncode, bytes(self._written), self._errors, ended)

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


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill the program's process group and reap all of it."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ChildProcessError):
        while True:  # orphans of the program became our children, and count against the process limit until reaped
            os.waitpid(-process.pid, 0)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Check without reaping, so that the process id, which is also the group id, stays reserved until the kill."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
