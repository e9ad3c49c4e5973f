"""Processes of tests/support that start by a fork. Imports of torch and Ray would cost each start 6 s of CPU time."""

from __future__ import annotations

import atexit
import importlib
import multiprocessing.context
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROGRAMS = ("support.chaos.learner_process", "support.chaos.producer_process")


def fork_context(also: Sequence[str] = ()) -> multiprocessing.context.ForkServerContext:
    """The only fork server of a process of tests, which has imported what its processes need. It ends with that
    process. The first caller in a process can name modules to be imported too."""
    context = multiprocessing.get_context("forkserver")
    here = str(Path(__file__).parents[1])
    if here not in os.environ.get("PYTHONPATH", ""):  # Python 3.11's fork server does not get sys.path
        os.environ["PYTHONPATH"] = f"{here}:{os.environ.get('PYTHONPATH', '')}"
    context.set_forkserver_preload([*PROGRAMS, "support.weight_group", *also])
    return context


class ForkedProcess:
    """`python -m PROGRAM ARGUMENTS`, or `python PROGRAM ARGUMENTS` for a path, whose output is appended to a file. Has
    the methods of `subprocess.Popen`. `also` are modules that a path imports, or a program that few tests run."""

    def __init__(
        self,
        program: str | Path,
        arguments: list[str],
        output: Path,
        environment: Mapping[str, str],
        also: Sequence[str] = (),
    ) -> None:
        is_script = isinstance(program, Path)
        assert is_script or program in (*PROGRAMS, *also), f"add {program} to PROGRAMS"
        words = (program, arguments, output, dict(environment))
        # A daemon could not start processes itself, as a script may.
        self._process = fork_context(also).Process(target=_run, args=words, daemon=not is_script)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(program: str | Path, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(program), *arguments]
    if isinstance(program, str):
        sys.exit(importlib.import_module(program).main())
    os.chdir(output.parent)
    multiprocessing.set_start_method("fork", force=True)  # as a script has it; else that of this process
    sys.path[:0] = [str(program.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # a forked process would end without
