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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from penstock_rollout.rewards.sandbox import seccomp
from penstock_rollout.rewards.sandbox.program import (
    READABLE,
    ControlGroup,
    Limits,
    ProcessEntry,
    RunningProgram,
    descendants,
    own_user,
    start_process,
)

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
    def start(
        self, command: Sequence[str], files: Mapping[str, str], limits: Limits, group: ControlGroup | None
    ) -> Iterator[WrappedProgram]:
        """Start a command with `files` in its folder. At the end of the block its processes and files are gone. Raises
        OSError or subprocess.SubprocessError if it cannot be started."""
        with contextlib.ExitStack() as stack:
            info, go = stack.enter_context(_pipe()), stack.enter_context(_pipe())
            with contextlib.ExitStack() as ends:
                passed = [info.pop(), go.pop(0)]
                for descriptor in passed:
                    ends.callback(os.close, descriptor)

                def passed_file(content: bytes) -> str:
                    passed.append(os.memfd_create("penstock"))
                    ends.callback(os.close, passed[-1])
                    os.write(passed[-1], content)
                    os.lseek(passed[-1], 0, os.SEEK_SET)
                    return str(passed[-1])

                wrapped = self._command(command, files, limits, passed_file)
                wrapped[1:1] = ["--info-fd", str(passed[0]), "--block-fd", str(passed[1])]
                user = own_user() if self.changes_user == "before" else None
                process = start_process(
                    wrapped, Path("/"), Path(_FOLDER), pass_fds=passed, user=user, group=user,
                    extra_groups=None if user is None else [],
                )  # fmt: skip
            stack.enter_context(process)
            running = WrappedProgram(process, limits, group)
            stack.callback(running.close)
            stack.callback(running.kill)
            running.find_init(info[0])
            if group is not None:
                group.limit(limits.memory_bytes, limits.max_processes + 1)
                group.add(running.init_pid)
            os.write(go[0], b"x")
            yield running

    def close(self) -> None:
        pass

    def _command(
        self, command: Sequence[str], files: Mapping[str, str], limits: Limits, passed_file: Callable[[bytes], str]
    ) -> list[str]:
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
        for name, text in files.items():
            content = passed_file(text.encode(errors="replace"))
            words += ["--perms", "0444", "--file", content, f"{_FOLDER}/{name}"]
        calls = passed_file(seccomp.encoded_filter(own_pid=None, shares_files=False))
        words += ["--remount-ro", "/", "--chdir", _FOLDER, "--seccomp", calls, "--"]
        # This process may lack the right to limit a process of another user, so the limits are set inside.
        # The first process of the namespace counts as one of the program's.
        process_limits = limits.of_a_process(num_others=1)
        words += ["prlimit", *(f"--{name.lower()}={soft}:{hard}" for name, soft, hard in process_limits), "--"]
        if self.changes_user == "inside":
            user_id = str(own_user())
            words += ["setpriv", "--reuid", user_id, "--regid", user_id, "--clear-groups", "--inh-caps", "-all", "--"]
        return [*words, *command]


class WrappedProgram(RunningProgram):
    """A program under bubblewrap. `init` is a descriptor of the first process of its pid namespace."""

    init = init_pid = -1

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

    def pids(self, processes: Mapping[int, ProcessEntry]) -> list[int]:
        return descendants(self.init_pid, processes)

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


@contextlib.contextmanager
def _pipe() -> Iterator[list[int]]:
    """The two ends of a pipe. Those that are still in the list at the end of the block are closed."""
    ends = list(os.pipe())
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)
