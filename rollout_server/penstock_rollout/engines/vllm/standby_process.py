"""What runs in a standby process (standby.py) until it becomes EngineCore."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import spawn
from typing import Any

from penstock_rollout.engines.vllm.standby import LENGTH
from penstock_rollout.engines.vllm.start import is_cpu_build, prepare_environment

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


def main(data: int, tracker: int, report: int, architectures: list[str]) -> None:
    """Import vLLM, say so, and wait to become EngineCore. Ends if the server ends or closes the pipe."""
    started, server = time.monotonic(), os.getppid()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    prepare_environment()
    problem = _preload(architectures)
    said = json.dumps({"problem": problem, "seconds": time.monotonic() - started})
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it
        os.write(report, said.encode() + b"\n")
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
