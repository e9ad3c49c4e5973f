"""Runs an untrusted Python program: confined, in a private folder, with a deadline.

The program leads a process group that it cannot leave. The whole group is killed when the program ends, when its time
is up, or when it prints too much. The program sees nothing of this process's environment.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock_rollout.rewards.sandbox.confinement import Confinement, Layers, Limits, adopt_orphans
from penstock_rollout.rewards.sandbox.program_io import READ_BYTES, Outcome, ProgramIO, kill_group

_PROBE_LIMITS = Limits(cpu_s=20, memory_bytes=2**30, file_bytes=2**20, max_processes=16)
_PROBE_S = 20.0


class Sandbox:
    """Runs programs under the layers of confinement that work on this machine."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    @classmethod
    def open(cls, *, allow_unisolated: bool) -> Sandbox:
        """Find the layers that work here. Raises ConfigError if they do not isolate and `allow_unisolated` is false."""
        layers = usable_layers()
        if not layers.isolates and not allow_unisolated:
            raise ConfigError(
                "this machine cannot isolate the code of code rewards, which needs Linux with Landlock and seccomp; "
                "run the server on another machine, or set allow_unisolated on the reward"
            )
        adopt_orphans()
        return cls(layers)

    def run(
        self, arguments: Sequence[str], folder: Path, stdin: bytes, limits: Limits, *, wall_s: float, output_bytes: int
    ) -> Outcome:
        """Run the Python interpreter with `arguments` in `folder`. No process of the program outlives the call."""
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
                preexec_fn=confinement.apply,  # noqa: PLW1509  (the calling process has one thread)
            )
        finally:
            confinement.close()
        try:
            return ProgramIO(process, stdin, output_bytes).run(time.monotonic() + wall_s)
        finally:
            kill_group(process)


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only its owner can enter. It is removed, with its content, at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="penstock-code-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@functools.cache
def usable_layers() -> Layers:
    """The strongest layers under which a trivial program runs on this machine."""
    for layers in Layers.wanted().weaker():
        with private_folder() as folder, contextlib.suppress(OSError, subprocess.SubprocessError):
            program = "print(open('/proc/self/environ').read())" if layers.isolates else "print()"
            outcome = Sandbox(layers).run(
                ["-c", program], folder, b"", _PROBE_LIMITS, wall_s=_PROBE_S, output_bytes=READ_BYTES
            )
            # An isolated program must be refused access to a file outside its folder.
            if b"PermissionError" in outcome.error_tail if layers.isolates else outcome.succeeded:
                return layers
    return Layers(0, has_seccomp=False, has_namespaces=False, drops_user=False)


def _environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
