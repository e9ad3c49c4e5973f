"""Runs a Python program that nobody trusts: confined, in a folder of its own, with a deadline.

The program's process leads a process group that it cannot leave; the whole group is killed when the program ends, when
its time is up, or when it prints too much. A program sees none of this process's environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError
from penstock_rollout.rewards.sandbox.confinement import Confinement, Layers, Limits, adopt_orphans

POLL_S = 0.05
ERROR_TAIL_BYTES = 4096
_READ_BYTES = 65536
_PROBE_LIMITS = Limits(cpu_s=20, memory_bytes=2**30, file_bytes=2**20, max_processes=16)
_PROBE_S = 20.0


@dataclass(frozen=True)
class Outcome:
    """`exit_code` is negative for a signal. `ended` says who ended the program."""

    exit_code: int
    stdout: bytes
    error_tail: bytes
    ended: Literal["itself", "deadline", "output"]

    @property
    def succeeded(self) -> bool:
        return self.ended == "itself" and self.exit_code == 0


class Sandbox:
    """Confines programs with the layers that work on this machine."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    @classmethod
    def open(cls, *, allow_unisolated: bool) -> Sandbox:
        """ConfigError where this machine cannot isolate a program and `allow_unisolated` is not set."""
        layers = usable_layers()
        if not layers.isolates and not allow_unisolated:
            raise ConfigError(
                "this machine cannot isolate the code of code rewards, which takes Linux with Landlock and seccomp; "
                "run the server on such a machine, or set allow_unisolated on the reward"
            )
        adopt_orphans()
        return cls(layers)

    def run(
        self, arguments: Sequence[str], folder: Path, stdin: bytes, limits: Limits, *, wall_s: float, output_bytes: int
    ) -> Outcome:
        """Run the interpreter with `arguments` in `folder`, and leave nothing of it running."""
        confinement = Confinement(self.layers, limits, folder)
        try:
            confinement.prepare()
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
                preexec_fn=confinement.apply,  # noqa: PLW1509  (the process that calls this has one thread)
            )
        finally:
            confinement.close()
        try:
            return _Conversation(process, stdin, output_bytes).hold(time.monotonic() + wall_s)
        finally:
            _kill_group(process)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that its user alone can enter, removed with all its content."""
    with tempfile.TemporaryDirectory(prefix="penstock-code-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@functools.cache
def usable_layers() -> Layers:
    """The strongest layers with which a trivial program runs."""
    for layers in Layers.wanted().weaker():
        with private_folder() as folder, contextlib.suppress(OSError, subprocess.SubprocessError):
            program = "print(open('/proc/self/environ').read())" if layers.isolates else "print()"
            outcome = Sandbox(layers).run(
                ["-c", program], folder, b"", _PROBE_LIMITS, wall_s=_PROBE_S, output_bytes=_READ_BYTES
            )
            # An isolated program must have been refused what lies outside of its folder.
            if b"PermissionError" in outcome.error_tail if layers.isolates else outcome.succeeded:
                return layers
    return Layers(0, has_seccomp=False, has_namespaces=False, drops_user=False)


class _Conversation:
    """Feeds a process and reads what it says, without waiting for a child of it that keeps a pipe open."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, output_bytes: int) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.process = process
        self._to_write = memoryview(stdin)
        self._output_bytes = output_bytes
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._written = bytearray()
        self._errors = b""

    def hold(self, deadline: float) -> Outcome:
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
                self._turn(selector, 0 if has_ended else min(POLL_S, max(0.0, deadline - time.monotonic())))
                if len(self._written) > self._output_bytes:
                    ended = "output"
                    break
                if has_ended:
                    break
                if time.monotonic() >= deadline:
                    ended = "deadline"
                    break
        _kill_group(self.process)
        return Outcome(self.process.returncode, bytes(self._written), self._errors, ended)

    def _turn(self, selector: selectors.BaseSelector, wait_s: float) -> None:
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
            self._to_write = self._to_write[os.write(self._stdin.fileno(), self._to_write[:_READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._to_write = memoryview(b"")
        if not self._to_write:
            selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, selector: selectors.BaseSelector, descriptor: int, *, is_output: bool) -> None:
        """All that is there now, up to one chunk past the limit."""
        while True:
            try:
                chunk = os.read(descriptor, _READ_BYTES)
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
    """Without collecting it: its id, and so its group's, stays taken until the group has been killed."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ChildProcessError):
        while True:  # its orphans, which came to this process: uncollected they would count as the user's processes
            os.waitpid(-process.pid, 0)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
