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

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self.ask(method, *arguments)
        return self.answer(method, timeout_s)

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call. `answer` waits for its end, so that several processes can work at the same time."""
        self._pipe.send((method, arguments))

    def answer(self, method: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
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
