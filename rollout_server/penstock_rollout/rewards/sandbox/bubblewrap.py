"""Confines a program with bubblewrap: it gets its own namespaces, in which the server's files and processes do not
exist.

| namespace                     | what the program sees                                                          |
|-------------------------------|--------------------------------------------------------------------------------|
| mount                         | the interpreter, read-only; a private /tmp of limited size; no /proc, no /home |
| pid                           | only its own processes; all of them end with the first                         |
| network, ipc, uts, cgroup     | nothing                                                                        |
| user                          | one user without rights (not when a server that runs as root needs its rights) |

The seccomp filter applies inside, and so do resource limits. A server that runs as root first becomes another user. If
that user cannot reach the interpreter, for example under /root, bubblewrap starts as root without a user namespace, and
`setpriv` changes the user inside.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock_rollout.rewards.sandbox import seccomp
from penstock_rollout.rewards.sandbox.limits import (
    ControlGroup,
    Limits,
    descendants,
    memory_is_exceeded,
    read_processes,
)
from penstock_rollout.rewards.sandbox.program import READABLE, Program, closing_streams, environment, own_user

_FOLDER = "/tmp"  # noqa: S108  (the program's own file system)
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
_START_S = 10.0
"""How long bubblewrap may take to set up the namespaces."""
_END_S = 10.0
"""How long the kernel may take to end the processes of a namespace."""


@dataclass(frozen=True)
class Bubblewrap:
    """Runs programs under bubblewrap. `changes_user` says how a program of root becomes another user: before bubblewrap
    starts, or inside. None if the server does not run as root."""

    changes_user: Literal["before", "inside"] | None
    name = "bubblewrap"

    @classmethod
    def choices(cls) -> list[Bubblewrap]:
        """Ways to try in this order. Empty if bubblewrap is not installed."""
        if not seccomp.is_supported() or shutil.which("bwrap") is None:
            return []
        return [cls("before"), cls("inside")] if os.geteuid() == 0 else [cls(None)]

    @contextlib.contextmanager
    def start(self, program: Program, limits: Limits, group: ControlGroup | None) -> Iterator[WrappedProgram]:
        with contextlib.ExitStack() as stack:
            passed: list[int] = []

            def passed_file(content: bytes) -> str:
                passed.append(_file_with(content))
                stack.callback(os.close, passed[-1])
                return str(passed[-1])

            info, info_write = os.pipe()
            go_read, go = os.pipe()
            start_ends, own_ends = [info_write, go_read], [info, go]
            stack.callback(_close_all, own_ends)
            with contextlib.ExitStack() as ends:
                ends.callback(_close_all, start_ends)
                command = self._command(program, limits, passed_file)
                command[1:1] = ["--info-fd", str(info_write), "--block-fd", str(go_read)]
                user = own_user() if self.changes_user == "before" else None
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd="/",
                    env=environment(_FOLDER), pass_fds=[*passed, *start_ends], start_new_session=True,
                    user=user, group=user, extra_groups=None if user is None else [],
                )  # fmt: skip
            stack.enter_context(closing_streams(process))
            running = WrappedProgram(process, limits, holds_memory=group is not None)
            stack.callback(running.close)
            stack.callback(running.kill)
            running.find_init(info)
            if group is not None:
                group.limit(limits.memory_bytes, limits.max_processes + 1)
                group.add(running.init_pid)
            os.write(go, b"x")
            yield running

    def close(self) -> None:
        pass

    def _command(self, program: Program, limits: Limits, passed_file: Callable[[bytes], str]) -> list[str]:
        needs_rights = self.changes_user == "inside"
        user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if needs_rights else ["--unshare-user"]
        words = [
            "bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
            "--die-with-parent", "--new-session", "--cap-drop", "ALL", *user,
            "--perms", "1777", "--size", str(max(limits.folder_bytes, resource.getpagesize())), "--tmpfs", _FOLDER,
        ]  # fmt: skip
        roots = readable_roots()
        shown = (*roots, *_DEVICES)
        for parent in sorted({str(parent) for path in shown for parent in Path(path).parents if parent != Path("/")}):
            words += ["--dir", parent]  # otherwise only root may enter it, or it has the mode of the original
        for path in roots:
            words += ["--ro-bind-try", path, path]
        for path in _DEVICES:
            words += ["--dev-bind-try", path, path]
        for name, text in program.files.items():
            content = passed_file(text.encode(errors="replace"))
            words += ["--perms", "0444", "--file", content, f"{_FOLDER}/{name}"]
        calls = passed_file(seccomp.encoded_filter(own_pid=None, shares_files=False))
        words += ["--remount-ro", "/", "--chdir", _FOLDER, "--seccomp", calls, "--"]
        # This process may lack the right to limit a process of another user, so the limits are set inside.
        words += ["prlimit", *_limit_options(limits), "--"]
        if self.changes_user == "inside":
            user_id = str(own_user())
            words += ["setpriv", "--reuid", user_id, "--regid", user_id, "--clear-groups", "--inh-caps", "-all", "--"]
        return [*words, *program.command]


class WrappedProgram:
    """A program under bubblewrap. `init` is a descriptor of the first process of its pid namespace."""

    def __init__(self, process: subprocess.Popen[bytes], limits: Limits, *, holds_memory: bool) -> None:
        self.process = process
        self.init = self.init_pid = -1
        self._limits = limits
        self._holds_memory = holds_memory

    def find_init(self, info: int) -> None:
        """Wait until the namespaces are there. Their first process then waits for our permission to go on."""
        text, deadline = b"", time.monotonic() + _START_S
        while b"}" not in text:
            ready, _, _ = select.select([info], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(info, 4096) if ready else b""
            if not chunk:
                raise OSError(f"bubblewrap did not start a program{self._complaint()}")
            text += chunk
        self.init_pid = int(json.loads(text)["child-pid"])
        self.init = os.pidfd_open(self.init_pid)

    def exceeds_memory(self) -> bool:
        if self._holds_memory:
            return False
        processes = read_processes()
        return memory_is_exceeded(descendants(self.init_pid, processes), processes, self._limits.memory_bytes)

    def exceeds_files(self) -> bool:
        return False

    def kill(self) -> None:
        """Kill the first process, with which the kernel ends all others. bubblewrap then ends by itself."""
        if self.process.returncode is not None:
            return
        if self.init < 0:
            self.process.kill()
            self.process.wait(_END_S)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.init, signal.SIGKILL)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(_END_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.init_pid, 0)  # it became our child if bubblewrap ended without reaping it

    def close(self) -> None:
        if self.init >= 0:
            os.close(self.init)

    def _complaint(self) -> str:
        """What bubblewrap printed before it ended."""
        self.process.kill()
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        self.process.wait(_END_S)
        text = (self.process.stderr.read() or b"").decode(errors="replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""


@functools.cache
def readable_roots() -> list[str]:
    """Paths of the interpreter. A path below another one is omitted."""
    existing = [path for path in dict.fromkeys(READABLE) if Path(path).exists() and not path.startswith("/dev/")]
    return [path for path in existing if not any(Path(other) in Path(path).parents for other in existing)]


def _limit_options(limits: Limits) -> list[str]:
    """Options of `prlimit`. The first process of the namespace counts as one of the program's."""
    names = {
        resource.RLIMIT_CPU: "cpu", resource.RLIMIT_FSIZE: "fsize", resource.RLIMIT_NPROC: "nproc",
        resource.RLIMIT_NOFILE: "nofile", resource.RLIMIT_CORE: "core", resource.RLIMIT_MEMLOCK: "memlock",
        resource.RLIMIT_AS: "as",
    }  # fmt: skip
    return [f"--{names[limit]}={soft}:{hard}" for limit, soft, hard in limits.of_a_process(num_others=1)]


def _file_with(content: bytes) -> int:
    """A descriptor from which the content can be read."""
    descriptor = os.memfd_create("penstock")
    os.write(descriptor, content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
