"""Results as they are written: one blocking read of a run's results serves everyone who waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from penstock.errors import PenstockError
from penstock.replay.results import PromptBook, PromptResult, entry_of, entry_order
from penstock_services.gateway.operations import bounded

logger = logging.getLogger(__name__)
BLOCK_S = 1.0
"""Longest blocking read. When the gateway stops, its streams end within this time."""
PACE_S = 0.1
"""Pause after each batch, so that a busy run wakes its watchers ten times a second and not for every result."""


class ResultFeed:
    """Wakes those who wait for results of one run.

    A single task reads the stream of results while anybody waits, so any number of watchers hold one Redis connection.
    The task only wakes them: each watcher reads from its own cursor, and misses nothing when it is slow."""

    def __init__(self, book: PromptBook, redis_timeout_s: float, stopping: asyncio.Event) -> None:
        self.book = book
        self.deadline_s = 2 * redis_timeout_s
        self.block_s = min(BLOCK_S, redis_timeout_s / 2)
        self.stopping = stopping
        self._watchers: set[asyncio.Event] = set()
        self._prompt_waits: dict[int, set[asyncio.Event]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._position = ""
        """The last entry that the reader has seen."""

    async def follow(self, cursor: str) -> AsyncIterator[list[PromptResult]]:
        """Yield all results after `cursor`, in order and each once, until the gateway stops."""
        while not self.stopping.is_set():
            found = await bounded(self.book.after(cursor), self.deadline_s)
            if found:
                cursor = found[-1].cursor
                yield found
            else:
                await self._wait_for_entry_after(entry_of(cursor))

    @contextlib.asynccontextmanager
    async def finishing(self, prompt_id: int) -> AsyncIterator[asyncio.Event]:
        """An event that is set whenever a result of the prompt is written, and when the gateway stops.

        Read the prompt's state within the block: a result that is written after that read sets the event."""
        event = asyncio.Event()
        self._prompt_waits.setdefault(prompt_id, set()).add(event)
        try:
            if self._reader is None:
                newest = await bounded(self.book.newest_entry(), self.deadline_s)
                self._start_reader(newest)
            yield event
        finally:
            self._prompt_waits[prompt_id].discard(event)
            if not self._prompt_waits[prompt_id]:
                del self._prompt_waits[prompt_id]

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader

    async def _wait_for_entry_after(self, entry: str) -> None:
        self._start_reader(entry)
        if entry_order(self._position) > entry_order(entry):
            return  # The reader saw it between the watcher's read and this call.
        event = asyncio.Event()
        self._watchers.add(event)
        try:
            await event.wait()
        finally:
            self._watchers.discard(event)

    def _start_reader(self, entry: str) -> None:
        if self._reader is None:
            self._position = entry
            self._reader = asyncio.create_task(self._read(), name="results")

    async def _read(self) -> None:
        try:
            while not self.stopping.is_set():
                found = await self.book.wait_for_results(self._position, self.block_s)
                if found:
                    self._position = entry_of(found[-1].cursor)
                    self._wake(found)
                    await asyncio.sleep(PACE_S)
                if not self._watchers and not self._prompt_waits:
                    return
        except PenstockError as error:
            # The watchers read again after this pause, and each reports the error to its own client.
            logger.warning("cannot wait for results: %s", error)
            await asyncio.sleep(self.block_s)
        finally:
            self._reader = None
            for event in self._watchers.union(*self._prompt_waits.values()):
                event.set()

    def _wake(self, results: list[PromptResult]) -> None:
        for event in self._watchers:
            event.set()
        for result in results:
            for event in self._prompt_waits.get(result.prompt_id, ()):
                event.set()
