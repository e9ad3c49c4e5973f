"""A program to run, the contract of confinements, and a program that runs under one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock_rollout.rewards.sandbox.control_group import ControlGroup
from penstock_rollout.rewards.sandbox.limits import Limits


@dataclass(frozen=True)
class Program:
    """The Python interpreter's arguments, and the files in the folder that it starts in."""

    arguments: Sequence[str]
    files: Mapping[str, str]


class RunningProgram(Protocol):
    """A program that has been started."""

    process: subprocess.Popen[bytes]
    """The process to wait for. Its standard streams are the program's."""

    def exceeds_memory(self) -> bool:
        """Whether all processes together use more memory than the limit. Always False if the kernel holds the limit."""
        ...

    def exceeds_files(self) -> bool:
        """Whether all files together are larger than the limit. Always False if the kernel holds the limit."""
        ...

    def kill(self) -> None:
        """Kill every process of the program and wait for their end. May be called again."""
        ...


class Confinement(Protocol):
    """A way to start programs so that they cannot harm the server."""

    name: str
    """What the log and `penstock doctor` call it."""

    def start(
        self, program: Program, limits: Limits, group: ControlGroup | None
    ) -> contextlib.AbstractContextManager[RunningProgram]:
        """Start a program. At the end of the block its processes and files are gone. Raises OSError or
        subprocess.SubprocessError if it cannot be started."""
        ...

    def close(self) -> None:
        """Remove what was kept between programs."""
        ...


def environment(folder: str) -> dict[str, str]:
    """Environment variables of a program. It sees none of this process's own."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def closing_streams(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Close the pipes of a process at the end of the block."""
    try:
        yield
    finally:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
