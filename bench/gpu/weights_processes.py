"""A worker process that answers calls over a pipe. Each call has a deadline."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CALL_TIMEOUT_S = 120.0


class Child:
    """Calls `make(*arguments)` in a fresh process. `call` calls methods of the object that it returned."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{method} took longer than {timeout_s:g} s")
        answer, failure = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(served, method)(*arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))
