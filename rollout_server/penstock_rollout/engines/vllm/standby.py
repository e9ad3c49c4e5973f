"""A process that imports vLLM while the server does, and then becomes EngineCore.

vLLM starts EngineCore as a new process once the server has imported vLLM, and the new process imports vLLM again, for
10 to 30 seconds; on the first start of a model, a third one imports it to look at the model's class. Here a process is
started when the engine is created. It imports what EngineCore needs and the model's class, notes for vLLM what the
class is, and waits for the call that vLLM would make in a new process. It is not a fork: it may use CUDA, and has no
threads or locks of the server. It gets the server's environment as it is when EngineCore starts.

It stays because its gain is measured (bench/gpu/cold_start.py, one start each on an H200 host): EngineCore begins 16 s
after `penstock up` instead of 37 s, and the first step of a cold run ends after 63 s instead of 77 s.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing import util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from penstock.config.rollout import EngineConfig
from penstock_rollout.engines.child_process import end_with_parent
from penstock_rollout.engines.vllm.start import architectures_of, is_cpu_build, preload

logger = logging.getLogger(__name__)

SWITCH = "PENSTOCK_VLLM_STANDBY"
"""The environment variable that turns standby processes on (1) or off (0). Without it, they are used on CUDA."""
READY_S = 180.0
"""How long an engine waits for its standby process. It has imported about as much as the server by then."""


class Standby:
    """The server's side of a standby process, which starts at once. It can be used once, or closed.

    `preload` imports everything, and returns why it could not, in one line."""

    def __init__(self, preload: Callable[[], str]) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = SpawnProcess(target=_become_engine_core, args=(theirs, os.getpid(), preload))
        self.process.start()
        theirs.close()
        self._is_free = True
        util.Finalize(None, self.close, exitpriority=10)  # otherwise multiprocessing would wait for its end

    def is_ready(self, timeout_s: float = READY_S) -> bool:
        """Wait until the process has imported everything. Returns whether it has; if not, it is closed."""
        started = time.monotonic()
        problem, seconds = f"it did not answer within {timeout_s:.0f} s, or has died", 0.0
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll(timeout_s):
                problem, seconds = self._pipe.recv()
        if problem:
            logger.warning("EngineCore starts without its standby process, which takes longer: %s", problem)
            self.close()
            return False
        waited_s = time.monotonic() - started
        logger.info("EngineCore's process imported vLLM in %.1f s; waited for %.1f s of it", seconds, waited_s)
        return True

    def when_ready(self) -> contextlib.AbstractContextManager[None]:
        """Wait until the process is ready. Within the block that is returned, vLLM starts EngineCore in it."""
        return self._becoming_engine_core() if self.is_ready() else contextlib.nullcontext()

    @contextlib.contextmanager
    def _becoming_engine_core(self) -> Iterator[None]:
        """Within the block, vLLM starts EngineCore in this process. Others that it starts are new processes."""
        from vllm.v1.engine import utils

        own = utils.get_mp_context
        utils.get_mp_context = lambda: StandbyContext(self)
        try:
            yield
        finally:
            utils.get_mp_context = own
            self.close()

    def process_for(
        self, target: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> SpawnProcess:  # fmt: skip
        """The standby process, which makes the call when it is started; or a new one, if this one was used."""
        if self._is_free:
            try:
                self.process.name = name or self.process.name
                call = ForkingPickler.dumps((target, tuple(args), dict(kwargs or {}), self.process.name))
            except RuntimeError as error:  # only a new process inherits open files
                logger.warning("EngineCore starts without its standby process: it is given open files (%s)", error)
            else:
                self._is_free = False
                self.process.start = partial(self._send_call, bytes(call))  # type: ignore[method-assign]
                return self.process
        return SpawnProcess(target=target, args=tuple(args), kwargs=dict(kwargs or {}), name=name)

    def _send_call(self, call: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # if it has died, vLLM finds that out by the sentinel
            self._pipe.send(dict(os.environ))
            self._pipe.send_bytes(call)

    def close(self) -> None:
        """Kill the process, unless it was handed over. May be called twice."""
        if self._is_free:
            self._is_free = False
            self.process.kill()
            self.process.join()
            self._pipe.close()


class StandbyContext(SpawnContext):
    """The context that vLLM gets. Its first process is the standby process."""

    def __init__(self, standby: Standby) -> None:
        super().__init__()
        self._standby = standby

    def Process(self, *, target: Callable[..., Any], **settings: Any) -> SpawnProcess:  # type: ignore[override]  # noqa: N802
        return self._standby.process_for(target, **settings)


def start_standby(config: EngineConfig, model_path: Path) -> Standby | None:
    """Start a process that will become EngineCore. Returns None where it would gain nothing, or must not be used. On
    CPU, EngineCore is forked from a process that has imported vLLM. VLLM_WORKER_MULTIPROC_METHOD=fork asks for the same
    on CUDA. A process that `rollout.engine.extra` binds to a NUMA node is started by a program of vLLM's."""
    is_wanted = os.environ.get(SWITCH, "0" if is_cpu_build() else "1") == "1"
    is_forked = not is_cpu_build() and os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "spawn") != "spawn"
    if not is_wanted or is_forked or config.extra.get("numa_bind"):
        return None
    return Standby(partial(preload, architectures_of(model_path)))


def _become_engine_core(pipe: Connection, server: int, preload: Callable[[], str]) -> None:
    """The standby process: import vLLM, report it, and wait for EngineCore's call. Ends with the server."""
    started = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    end_with_parent(server, lambda: os._exit(1))
    try:
        pipe.send((preload(), time.monotonic() - started))
        environment = pipe.recv()
        os.environ.clear()
        os.environ.update(environment)
        target, args, kwargs, name = pipe.recv()
    except (EOFError, BrokenPipeError):  # the server does not need it any more
        sys.exit(0)
    pipe.close()
    signal.signal(signal.SIGINT, before)
    multiprocessing.current_process().name = name
    target(*args, **kwargs)
