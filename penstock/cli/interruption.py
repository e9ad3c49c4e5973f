"""What a command says when Ctrl-C ends it. `penstock.cli.main` prints it as one line and exits with 130."""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@contextmanager
def interruptible(text: str) -> Iterator[None]:
    """Within the block, Ctrl-C says what was interrupted: `while it waited for Redis`. The innermost block says it."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise interrupt if str(interrupt) else KeyboardInterrupt(text) from None


def run_interruptible(work: Coroutine[Any, Any, T], text: str) -> T:
    """Like `asyncio.run`, for work that may swallow a cancellation, as calls of Redis do: Ctrl-C cancels it until it
    has ended."""
    import asyncio

    from penstock.cancellation import end_task

    async def supervised() -> T:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            await end_task(task)
            raise
        return task.result()

    with interruptible(text):
        return asyncio.run(supervised())
