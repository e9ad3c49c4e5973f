"""A process that imports vLLM while the server does, and then becomes EngineCore.

vLLM starts EngineCore as a new process once the server has imported vLLM and made its config, and the new process
imports vLLM again. On the first start of a model, a third process imports it to look at the model's class. One import
takes 10 to 30 seconds. Here a process is started when the engine is created. It imports what EngineCore needs and the
model's class, and notes for vLLM what the class is. Then it waits for what `multiprocessing` sends to a process that it
starts.

It is a new process, not a fork: it may use CUDA, and has no threads or locks of the server. Its environment is replaced
by that of the server at the time EngineCore starts, before vLLM's objects are read. It ends when the server ends.

It stays because its gain is measured (bench/gpu/cold_start.py, one start each on an H200 host): EngineCore begins 16 s
after `penstock up` instead of 37 s, and the first step of a cold run ends after 63 s instead of 77 s. Every start and
restart of a server gains it, which is when training waits for a lost server.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import select
import signal
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from pathlib import Path
from typing import Any, Self

from penstock.config.rollout import EngineConfig
from penstock.weights.folder_tensors import read_json
from penstock_rollout.engines.vllm.start import is_cpu_build, prepare_environment

logger = logging.getLogger(__name__)

SWITCH = "PENSTOCK_VLLM_STANDBY"
"""The environment variable that turns standby processes on (1) or off (0). Without it, they are used on CUDA."""
READY_S = 180.0
"""How long an engine waits for its standby process. It has imported about as much as the server by then."""
LENGTH = struct.Struct("!q")
"""Before the environment, which is JSON, the pipe has its length."""
_PROGRAM = "from penstock_rollout.engines.vllm.standby import main; main({}, {}, {}, {!r})"
_MODULES = (
    "vllm.v1.engine.core",
    "penstock_rollout.engines.vllm.worker",
    "penstock_rollout.engines.vllm.core_flip",
    "penstock_rollout.engines.vllm.scheduler",
)
_WORKERS = {
    True: ("vllm.v1.worker.cpu_worker",),
    False: ("vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
}
"""By whether the CPU wheel is installed."""
PARENT_POLL_S = 0.5


@dataclass
class Standby:
    """The server's side of a standby process. It can be used once, or closed."""

    pid: int
    _sentinel: int
    """The end of a pipe that becomes readable when the process ends."""
    _data: int
    """The end of the pipe that the process reads."""
    _report: int
    """The end of the pipe to which the process writes one line when it has imported everything."""

    @classmethod
    def start(cls, architectures: Sequence[str]) -> Self:
        """Start the process, with this environment. Returns at once. `architectures` are those of the model folder."""
        tracker = resource_tracker.getfd()
        assert tracker is not None, "getfd starts it"
        data, own_data = os.pipe()
        own_sentinel, sentinel = os.pipe()
        own_report, report = os.pipe()
        executable = os.fsdecode(spawn.get_executable())
        program = _PROGRAM.format(data, tracker, report, list(architectures))
        flags = util._args_from_interpreter_flags()  # type: ignore[attr-defined]
        command = [executable, *flags, "-c", program, "--multiprocessing-fork"]
        try:
            pid = util.spawnv_passfds(os.fsencode(executable), command, [tracker, data, sentinel, report])
        finally:
            for end in (data, sentinel, report):
                os.close(end)
        return cls(pid, own_sentinel, own_data, own_report)

    def is_ready(self, timeout_s: float = READY_S) -> bool:
        """Wait until the process has imported everything. Returns whether it has; if not, it is closed."""
        started = time.monotonic()
        line = self._read_report(timeout_s)
        report = json.loads(line) if line else {"problem": f"it did not answer within {timeout_s:.0f} s, or has died"}
        if report["problem"]:
            logger.warning("EngineCore starts without its standby process, which takes longer: %s", report["problem"])
            self.close()
            return False
        waited_s = time.monotonic() - started
        logger.info(
            "EngineCore's process imported vLLM in %.1f s; waited for %.1f s of it", report["seconds"], waited_s
        )
        return True

    def _read_report(self, timeout_s: float) -> bytes:
        """Read the line of the process. Returns nothing if it does not come in time, or the process has died."""
        deadline, line = time.monotonic() + timeout_s, b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([self._report], [], [], max(0.0, deadline - time.monotonic()))
            read = os.read(self._report, 4096) if readable else b""
            if not read:
                return b""
            line += read
        return line

    def when_ready(self) -> contextlib.AbstractContextManager[None]:
        """Wait until the process is ready. Within the block that is returned, vLLM starts EngineCore in it."""
        return self.becoming_engine_core() if self.is_ready() else contextlib.nullcontext()

    @contextlib.contextmanager
    def becoming_engine_core(self) -> Iterator[None]:
        """Within the block, vLLM starts EngineCore in this process. Others that it starts are new processes."""
        from vllm.v1.engine import utils

        own = utils.get_mp_context
        utils.get_mp_context = lambda: _StandbyContext(self)
        try:
            yield
        finally:
            utils.get_mp_context = own
            self.close()

    def hand_over(self, message: memoryview) -> tuple[int, int, int]:
        """Send this environment and what `multiprocessing` sends to a new process. Returns the process's id, its
        sentinel, and the pipe that must stay open while this process lives. The caller owns all three."""
        environment = json.dumps(dict(os.environ)).encode()
        handed = self.pid, self._sentinel, self._data
        self.pid = 0
        os.close(self._report)
        # If it has died, vLLM finds that out by the sentinel.
        with contextlib.suppress(BrokenPipeError), open(handed[2], "wb", closefd=False) as pipe:
            pipe.write(LENGTH.pack(len(environment)) + environment)
            pipe.write(message)
        return handed

    @property
    def is_free(self) -> bool:
        return self.pid != 0

    def close(self) -> None:
        """Kill the process, unless it was handed over. May be called twice."""
        if not self.is_free:
            return
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        self.pid = 0
        for end in (self._sentinel, self._data, self._report):
            os.close(end)


class _StandbyContext(SpawnContext):
    """The context that vLLM gets. Its first process is the standby process."""

    def __init__(self, standby: Standby) -> None:
        super().__init__()
        self._standby = standby

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        return _StandbyProcess(self._standby, *args, **kwargs)


class _StandbyProcess(SpawnProcess):
    def __init__(self, standby: Standby, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._standby: Standby | None = standby

    def _Popen(self, process_obj: Any) -> Any:  # type: ignore[override]  # noqa: N802
        standby, self._standby = self._standby, None  # it stays here
        if standby is None or not standby.is_free:
            return popen_spawn_posix.Popen(process_obj)
        return _StandbyPopen(process_obj, standby)


class _StandbyPopen(popen_spawn_posix.Popen):
    """Does what its base class does, with a process that runs already."""

    _fds: list[int]

    def __init__(self, process_obj: Any, standby: Standby) -> None:
        self._standby = standby
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        message = io.BytesIO()
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj._name), message)
            reduction.dump(process_obj, message)
        finally:
            set_spawning_popen(None)
        if self._fds:  # only a new process inherits open files
            logger.warning("EngineCore starts without its standby process: it is given open files")
            self._fds.clear()
            super()._launch(process_obj)  # type: ignore[misc]
            return
        self.pid, self.sentinel, parent = self._standby.hand_over(message.getbuffer())
        self.finalizer = util.Finalize(self, util.close_fds, (parent, self.sentinel))  # type: ignore[attr-defined]


def start_standby(config: EngineConfig, model_path: Path) -> Standby | None:
    """Start a process that will become EngineCore. Returns None where it would gain nothing, or must not be used.

    On CPU, EngineCore is forked from a process that has imported vLLM. VLLM_WORKER_MULTIPROC_METHOD=fork asks for the
    same on CUDA. A process that `rollout.engine.extra` binds to a NUMA node is started by a program of vLLM's."""
    is_wanted = os.environ.get(SWITCH, "0" if is_cpu_build() else "1") == "1"
    is_forked = not is_cpu_build() and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn") != "spawn"
    if not is_wanted or is_forked or config.extra.get("numa_bind"):
        return None
    return Standby.start(read_json(model_path / "config.json").get("architectures") or [])


def main(data: int, tracker: int, report: int, architectures: list[str]) -> None:
    """Import vLLM, say so, and wait to become EngineCore. Ends if the server ends or closes the pipe."""
    started, server = time.monotonic(), os.getppid()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    prepare_environment()
    problem = _preload(architectures)
    message = json.dumps({"problem": problem, "seconds": time.monotonic() - started})
    with contextlib.suppress(BrokenPipeError):  # the server does not wait for it
        os.write(report, message.encode() + b"\n")
    os.close(report)
    environment = _read_environment(data, server)
    if environment is None:
        sys.exit(0)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, before)
    spawn.spawn_main(pipe_handle=data, tracker_fd=tracker)


def _preload(architectures: Sequence[str]) -> str:
    """Import everything. Returns why it could not, in one line."""
    try:
        for module in (*_MODULES, *_WORKERS[is_cpu_build()]):
            importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    _note_model_class(architectures)
    return ""


def _note_model_class(architectures: Sequence[str]) -> None:
    """Import the model's class and note what it is in vLLM's cache, where the server's vLLM looks first.

    vLLM would start a process for this, so that the server does not use CUDA. This is such a process. If it fails, the
    server's vLLM does it in its own way, and says what is wrong with the model."""
    try:
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = _call
        for architecture in architectures:
            if architecture in registry.ModelRegistry.models:
                model = registry.ModelRegistry.models[architecture]
                model.inspect_model_cls()
                model.load_model_cls()
    except Exception as error:
        print(f"the class of {', '.join(architectures)} was not imported ahead: {error}", file=sys.stderr)


def _call(function: Callable[[], Any]) -> Any:
    return function()


def _read_environment(data: int, server: int) -> dict[str, str] | None:
    """Read the server's environment, which comes first. Returns None if the server closes the pipe or ends."""
    length = _read(data, LENGTH.size, server)
    text = _read(data, LENGTH.unpack(length)[0], server) if length else b""
    return json.loads(text) if text else None


def _read(data: int, num_bytes: int, server: int) -> bytes:
    """Read exactly that many bytes. Returns nothing if the pipe or the server ends before.

    The pipe alone does not tell: other processes that the server has forked may have it open."""
    read = b""
    while len(read) < num_bytes:
        readable, _, _ = select.select([data], [], [], PARENT_POLL_S)
        more = os.read(data, num_bytes - len(read)) if readable else b""
        if (readable and not more) or os.getppid() != server:
            return b""
        read += more
    return read
