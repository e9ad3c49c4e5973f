"""A sampler of the user's own: it chooses the rows to train on next, and sees the rewards that each row has brought.

    class Sampler:
        def __init__(self, num_prompts, seed, **sampler_kwargs): ...
        def choose(self, count): ...              # returns `count` numbers of rows, from 0 to num_prompts - 1
        def observe(self, row, rewards): ...      # called for each group that was made from a row

Rewards arrive while training runs, some steps after their row was chosen. A feed that is started again makes a new
sampler, which sees the rewards of the prompts that this feed submits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.codec import decode_group
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput, NotFound, PoisonGroup
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.replay.results import PromptBook
from penstock.user_code import load_callable

MAX_WAITING = 100_000
"""Submitted prompts whose rewards are still awaited. The oldest are forgotten beyond this."""


class Sampler(Protocol):
    def choose(self, count: int) -> Sequence[int]: ...

    def observe(self, row: int, rewards: Sequence[float]) -> None: ...


class Curriculum:
    """The user's sampler, and which prompt was made from which row."""

    def __init__(self, sampler: Sampler, queue: RedisReplayQueue, num_prompts: int, where: str) -> None:
        self.sampler = sampler
        self.queue = queue
        self.num_prompts = num_prompts
        self.where = where
        self._book = PromptBook(queue)
        self._cursor = ""
        self._rows: dict[int, int] = {}

    @classmethod
    def open(cls, config: RunConfig, queue: RedisReplayQueue, num_prompts: int) -> Curriculum | None:
        """The curriculum of the config; None if it names no sampler."""
        dataset = config.dataset
        if not dataset.sampler:
            return None
        sampler = _checked(
            "dataset.sampler", load_callable(dataset.sampler, "dataset.sampler"), num_prompts=num_prompts,
            seed=config.seed, **dataset.sampler_kwargs,
        )  # fmt: skip
        return cls(sampler, queue, num_prompts, dataset.sampler)

    def choose(self, count: int) -> list[int]:
        """The next rows. Raises InvalidInput if the sampler does not return as many rows of the dataset."""
        rows = [int(row) for row in _checked(self.where, self.sampler.choose, count)]
        if len(rows) != count or not all(0 <= row < self.num_prompts for row in rows):
            raise InvalidInput(
                "dataset.sampler", f"{self.where} must choose {count} rows from 0 to {self.num_prompts - 1}"
            )
        return rows

    def remember(self, last_id: int, rows: Sequence[int]) -> None:
        """The prompts of these rows were submitted, the last one with this id."""
        self._rows |= {last_id - len(rows) + 1 + place: row for place, row in enumerate(rows)}
        for prompt_id in list(self._rows)[: max(0, len(self._rows) - MAX_WAITING)]:
            del self._rows[prompt_id]

    async def look(self) -> None:
        """Show the sampler the rewards of groups that have been made since the last look."""
        if not self._cursor:
            self._cursor = await self._book.start("")
        while results := await self._book.after(self._cursor):
            self._cursor = results[-1].cursor
            for result in results:
                row = self._rows.pop(result.prompt_id, None)
                if row is not None and result.state == "queued":
                    await self._show(result.prompt_id, row)

    async def _show(self, prompt_id: int, row: int) -> None:
        try:
            group = decode_group(await self.queue.get_group(prompt_id))
        except (NotFound, PoisonGroup):  # trained and deleted already, or not a group
            return
        rewards = [sample.reward for sample in group.trajectories if not sample.is_baseline]
        _checked(self.where, self.sampler.observe, row, rewards)


def _checked(where: str, call: Any, *arguments: Any, **keywords: Any) -> Any:
    """Call the user's code. Raises InvalidInput with what it raised."""
    try:
        return call(*arguments, **keywords)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise InvalidInput("dataset.sampler", f"{where} failed: {why}") from error
