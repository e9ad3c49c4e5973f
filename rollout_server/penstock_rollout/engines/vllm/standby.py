"""A process that imports vLLM while the server does, and then becomes EngineCore.

vLLM starts EngineCore as a new process once the server has imported vLLM and made its config, and the new process
imports vLLM again. On the first start of a model, a third process imports it to look at the model's class. One import
takes 10 to 30 seconds. Here a process is started when the engine is created. It imports what EngineCore needs and the
model's class, and notes for vLLM what the class is. Then it waits for what `multiprocessing` sends to a process that it
starts.

It is a new process, not a fork: it may use CUDA, and has no threads or locks of the server. Its environment is replaced
by that of the server at the time EngineCore starts, before vLLM's objects are read. It ends when the server ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any, Self

logger = logging.getLogger(__name__)

SWITCH = "PENSTOCK_VLLM_STANDBY"
"""The environment variable that turns standby processes on (1) or off (0). Without it, they are used on CUDA."""
READY_S = 180.0
"""How long an engine waits for its standby process. It has imported about as much as the server by then."""
LENGTH = struct.Struct("!q")
"""Before the environment, which is JSON, the pipe has its length."""
_PROGRAM = "from penstock_rollout.engines.vllm.standby_process import main; main({}, {}, {}, {!r})"


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
        said = json.loads(line) if line else {"problem": f"it did not answer within {timeout_s:.0f} s, or has died"}
        if said["problem"]:
            logger.warning("EngineCore starts without its standby process, which takes longer: %s", said["problem"])
            self.close()
            return False
        waited_s = time.monotonic() - started
        logger.info("EngineCore's process imported vLLM in %.1f s; waited for %.1f s of it", said["seconds"], waited_s)
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
