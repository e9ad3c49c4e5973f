"""Runs untrusted Python programs: confined, with limits and a deadline. All processes of a program are killed when it
ends, when its time is up, or when it exceeds a limit.

There are two confinements because bubblewrap, which hides the server's files and processes altogether, cannot start in
pods without user namespaces. It must be installed, and is used wherever it starts; the built-in one is for such pods.
`python -m penstock_rollout.rewards.sandbox.run [CONFINEMENT]` prints which confinement works on this machine.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from penstock.errors import ConfigError
from penstock_rollout.rewards.sandbox.bubblewrap import Bubblewrap
from penstock_rollout.rewards.sandbox.builtin import Builtin, remove_leftovers
from penstock_rollout.rewards.sandbox.program import READ_BYTES, ControlGroup, Limits, Outcome
from penstock_rollout.rewards.sandbox.seccomp import check, load_libc

Choice = Literal["auto", "bubblewrap", "builtin"]
_PR_SET_CHILD_SUBREAPER = 36
_PROBE_LIMITS = Limits(cpu_s=20, memory_bytes=2**30, file_bytes=2**20, folder_bytes=2**20, max_processes=16)
_PROBE_S = 20.0
_PROBE = """
import socket
for attempt in (lambda: open("/proc/self/environ"), lambda: open("/etc/passwd"), socket.socket):
    try: attempt()
    except OSError: print("refused")
"""


@dataclass(eq=False)
class Sandbox:
    """Runs programs one at a time under one confinement, in a control group if there is one."""

    confinement: Bubblewrap | Builtin
    group: ControlGroup | None

    @classmethod
    def open(cls, choice: Choice = "auto", *, allow_unisolated: bool = False) -> Sandbox:
        """Find the confinement that works here. Raises ConfigError if none isolates and `allow_unisolated` is false."""
        if sys.platform == "linux":
            # Descendants whose own parent dies become children of this process, which ends them.
            check(load_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
            if choice == "auto" and shutil.which("bwrap") is None and not allow_unisolated:
                raise ConfigError(
                    "bubblewrap is not installed; install it (apt-get install bubblewrap), or set confinement to "
                    "builtin, which isolates less, on the reward"
                )
        sandbox = _find(choice)
        if choice == "bubblewrap" and sandbox.confinement.name != "bubblewrap":
            raise ConfigError(
                "bubblewrap does not work on this machine; install it (apt-get install bubblewrap) and allow user "
                "namespaces, or set confinement to auto or builtin on the reward"
            )
        if not sandbox.isolates and not allow_unisolated:
            raise ConfigError(
                "this machine cannot isolate the code of code rewards, which needs bubblewrap, or Linux with Landlock "
                "and seccomp; run the server on another machine, or set allow_unisolated on the reward"
            )
        return sandbox

    @property
    def isolates(self) -> bool:
        return self.confinement.name != "none"

    @property
    def description(self) -> str:
        """One line for the log and `penstock doctor`."""
        if not self.isolates:
            return "without isolation"
        memory = "a control group holds" if self.group is not None else "the sandbox measures"
        return f"confined by {self.confinement.name}; {memory} the memory of a program's processes together"

    def run(
        self, arguments: Sequence[str], files: Mapping[str, str], stdin: bytes, limits: Limits, *, wall_s: float,
        output_bytes: int,
    ) -> Outcome:  # fmt: skip
        """Run Python with `arguments` in a folder with `files`. No process or file outlives the call."""
        command = [sys.executable, "-I", "-B", *arguments]
        with self.confinement.start(command, files, limits, self.group) as running:
            return running.run(stdin, output_bytes, time.monotonic() + wall_s)

    def close(self) -> None:
        self.confinement.close()
        if self.group is not None:
            self.group.close()


@functools.cache
def _find(choice: Choice) -> Sandbox:
    """The strongest confinement under which a trivial program runs on this machine."""
    remove_leftovers()
    group = ControlGroup.create()
    confinements: list[Bubblewrap | Builtin] = [*Bubblewrap.choices()] if choice != "builtin" else []
    for confinement in [*confinements, *Builtin.choices()]:
        for choice_of_group in dict.fromkeys((group, None)):
            sandbox = Sandbox(confinement, choice_of_group)
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                outcome = sandbox.run(["-c", _PROBE], {}, b"", _PROBE_LIMITS, wall_s=_PROBE_S, output_bytes=READ_BYTES)
                # An isolated program must be refused files outside and the network.
                if outcome.succeeded and (not sandbox.isolates or outcome.stdout.split() == [b"refused"] * 3):
                    atexit.register(_close_in, os.getpid(), sandbox)
                    return sandbox
        confinement.close()
    return Sandbox(Builtin.choices()[-1], None)


def _close_in(pid: int, sandbox: Sandbox) -> None:
    """Close the sandbox at exit, but not in a fork of the process that opened it."""
    if os.getpid() == pid:
        sandbox.close()


def main() -> int:
    try:
        print(Sandbox.open(cast(Choice, sys.argv[1] if len(sys.argv) > 1 else "auto")).description)
    except ConfigError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
