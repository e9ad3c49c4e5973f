"""Feeds a dataset to a run: every prompt of every epoch once, in an order that follows from the seed.

One script submits a chunk and advances the position, which is stored in Redis with the prompts. So a feeder that is
killed or replaced skips and repeats nothing, even if Redis loses its tail. Learner checkpoints record the position.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.codec import decode_group, encode_prompt
from penstock.config.dataset import DatasetConfig
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, InvalidInput, NotFound, PoisonGroup, QueueFull, Unavailable, named
from penstock.feed.datasets import read_files, shown_files
from penstock.replay.queue import PromptIntake, RedisReplayQueue
from penstock.replay.results import PromptBook
from penstock.tracing import Tracing
from penstock.trajectory import Prompt, Sampling
from penstock.user_code import load_callable


class EpochOrder:
    """Which rows each epoch of a dataset has, and in which order. It follows from the seed alone. An epoch has each row
    once, or as often as the weight of its file says."""

    def __init__(self, parts: Sequence[tuple[int, float]], *, shuffle: bool, seed: int) -> None:
        """`parts` has the number of rows and the weight of each file."""
        self.parts = parts
        self.shuffle = shuffle
        self.seed = seed
        self.num_rows = sum(_num_drawn(count, weight) for count, weight in parts)
        """Number of rows of one epoch."""
        self.rows = lru_cache(maxsize=2)(self._rows)
        """The rows of an epoch by its number, in order."""

    def _rows(self, epoch: int) -> NDArray[np.int64]:
        # numpy guarantees RandomState's streams, so a run continues in the same order under every release of numpy.
        drawn, first = [], 0
        for number, (count, weight) in enumerate(self.parts):
            drawn.append(first + self._draw(epoch, number, count, weight))
            first += count
        chosen = np.concatenate(drawn)
        if not self.shuffle:
            return chosen
        return chosen[np.random.RandomState([self.seed, epoch]).permutation(len(chosen))]

    def _draw(self, epoch: int, part: int, count: int, weight: float) -> NDArray[np.int64]:
        """The rows of a file in an epoch: all for each whole part of the weight, and a rest that rotates by epoch."""
        whole, rest = divmod(_num_drawn(count, weight), count)
        rows = np.tile(np.arange(count), whole)
        if not rest:
            return rows
        order = np.random.RandomState([self.seed, part, 1]).permutation(count)
        return np.concatenate([rows, np.sort(np.take(order, np.arange(epoch * rest, (epoch + 1) * rest), mode="wrap"))])


def require_drawn(parts: Sequence[tuple[int, float]], where: str) -> None:
    """Raise InvalidInput if an epoch would have no row of a file."""
    for count, weight in parts:
        if not _num_drawn(count, weight):
            raise InvalidInput(where, f"weight {weight:g} leaves none of a file's {count} rows; raise it")


def _num_drawn(count: int, weight: float) -> int:
    """How many rows an epoch has of a file."""
    return round(count * weight)


MAX_WAITING = 100_000
"""Submitted prompts whose rewards are still awaited. The oldest are forgotten beyond this."""


class Sampler(Protocol):
    """A sampler of the user's own, made with `num_prompts`, `seed` and `sampler_kwargs`. Rewards arrive some steps
    after their row was chosen. A feed that starts again makes a new sampler, which sees the rewards of its prompts."""

    def choose(self, count: int) -> Sequence[int]:
        """The `count` rows to train on next, from 0 to num_prompts - 1."""

    def observe(self, row: int, rewards: Sequence[float]) -> None:
        """Called for each group that was made from a row."""


class Curriculum:
    """The user's sampler, and which prompt was made from which row."""

    def __init__(self, sampler: Sampler, queue: RedisReplayQueue, num_prompts: int, where: str) -> None:
        self.sampler = sampler
        self.queue = queue
        self.num_prompts = num_prompts
        self.where = where
        self._book = PromptBook(queue.client, queue.run)
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

    async def show_rewards(self) -> None:
        """Show the sampler the rewards of groups that have been made since the last call."""
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
        raise InvalidInput("dataset.sampler", f"{where} failed: {named(error)}") from error


MIN_DEAD_LETTERS = 32
"""Prompts with the same reason that must be dead-lettered before their share counts."""


class DeadLetterShare:
    """Compares dead letters with the groups that were made since the feed began, or since the run was last paused."""

    def __init__(self, limit: float | None) -> None:
        """`limit` is the share of prompts with one reason at which the run pauses; None for never."""
        self.limit = limit
        self._reasons: Mapping[str, int] | None = None
        self._inserted = 0

    def reason_to_pause(self, num_inserted: int, reasons: Mapping[str, int]) -> str:
        """Why the run should pause, or an empty text, from the counts since the run began."""
        if self._reasons is None:
            self.begin_again(num_inserted, reasons)
        before = self._reasons or {}
        new = {reason: count - before.get(reason, 0) for reason, count in reasons.items()}
        num_finished = num_inserted - self._inserted + sum(new.values())
        for reason, count in new.items():
            if self.limit is not None and count >= MIN_DEAD_LETTERS and count >= self.limit * num_finished:
                return (
                    f"{count} of the newest {num_finished} prompts were dead-lettered with {reason}; correct the "
                    "dataset or rollout.prompt, or raise dataset.max_dead_letter_share; `penstock queue dlq` lists them"
                )
        return ""

    def begin_again(self, num_inserted: int, reasons: Mapping[str, int]) -> None:
        """Compare with these counts from here on. Called once the run is paused."""
        self._reasons, self._inserted = dict(reasons), num_inserted


logger = logging.getLogger(__name__)
CHUNK_PROMPTS = 256
POLL_S = 0.5
WATCH_S = 2.0
RETRY_S = 5.0
"""Pause before the next try while Redis is away or full."""
_SEED_STRIDE = 1_000_003
_NUM_SEEDS = 2**62
"""Seeds of samples are below this number, which every engine and the wire format can hold."""


def seeded(prompt: Prompt, seed: int, number: int) -> Prompt:
    """Return the prompt with seeds for its samples. Prompts with different numbers have different seeds."""
    first = (seed * _SEED_STRIDE + number * prompt.num_samples) % _NUM_SEEDS
    return replace(prompt, sampling=replace(prompt.sampling, seed=first))


class PromptStream:
    """The prompts of a dataset by number: number p is place `p % n` of the order of epoch `p // n`, where n is the
    number of prompts of an epoch. An epoch has each prompt once, or as often as the weight of its file says."""

    def __init__(
        self, prompts: Sequence[Prompt], config: DatasetConfig, seed: int, parts: Sequence[tuple[int, float]] = ()
    ) -> None:
        """`parts` has the number of prompts and the weight of each file. Without it, all have the weight 1."""
        self.prompts = prompts
        self.config = config
        self.seed = seed
        shuffle_seed = seed % 2**32 if config.shuffle_seed is None else config.shuffle_seed
        self.order = EpochOrder(parts or ((len(prompts), 1.0),), shuffle=config.shuffle, seed=shuffle_seed)
        self.epoch_prompts = self.order.num_rows
        """Number of prompts of one epoch."""

    @classmethod
    def read(cls, config: RunConfig) -> PromptStream:
        dataset = config.dataset
        if dataset.file is None:
            raise ConfigError("dataset.file is not set; give the data to feed")
        files = read_files(dataset.file, dataset, dataset.num_samples, dataset.sampling)
        prompts = [prompt for _, part in files for prompt in part]
        if not prompts:
            raise InvalidInput(shown_files(dataset.file), "holds no prompts")
        parts = [(len(part), weight) for weight, part in files if part]
        require_drawn(parts, shown_files(dataset.file))
        return cls(prompts, dataset, config.seed, parts)

    @property
    def num_prompts(self) -> int | None:
        """Number of prompts over all epochs; None if there is no end."""
        return self.config.epochs * self.epoch_prompts or None

    @property
    def fingerprint(self) -> str:
        """Hash of the dataset's rows and their order. Sampling parameters do not change it."""
        parts = self.order.parts
        weighted = [parts] if any(weight != 1.0 for _, weight in parts) else []
        what = (self.config.shuffle, self.order.seed, len(self.prompts), *weighted)
        digest = hashlib.sha256(repr(what).encode())
        for prompt in self.prompts:
            digest.update(hashlib.sha256(encode_prompt(replace(prompt, sampling=Sampling(), num_samples=1))).digest())
        return digest.hexdigest()

    def chunk(self, position: int, max_prompts: int) -> list[Prompt]:
        """The prompts from `position` on; empty at the end."""
        end = position + max_prompts if self.num_prompts is None else min(position + max_prompts, self.num_prompts)
        return [self._at(number) for number in range(position, end)]

    def _at(self, number: int) -> Prompt:
        epoch, place = divmod(number, self.epoch_prompts)
        return seeded(self.prompts[int(self.order.rows(epoch)[place])], self.seed, number)


class Feeder:
    """Keeps up to `dataset.max_pending` prompts waiting until the dataset ends. Only one of several feeders submits."""

    def __init__(
        self, queue: PromptIntake, stream: PromptStream, tracing: Tracing | None = None,
        pause: Callable[[str], Awaitable[None]] | None = None, loss_window_s: float = 0.0,
        curriculum: Curriculum | None = None,
    ) -> None:  # fmt: skip
        """`pause` pauses the run with a reason. Redis cannot lose what was written `loss_window_s` ago."""
        self.loss_window_s = loss_window_s
        self.curriculum = curriculum
        """The user's sampler, which replaces the order of the dataset."""
        self._last_id = 0
        self.queue = queue
        self.pause = pause
        self.dead_letters = DeadLetterShare(stream.config.max_dead_letter_share)
        self.tracing = tracing or Tracing()
        self.stream = stream
        self.config = stream.config
        self.fingerprint = stream.fingerprint
        self._has_waited = False
        self._dead_before: int | None = None
        """Dead letters that are not from this dataset, as far as the counts tell."""

    async def run(self) -> int:
        """Feed until all prompts are submitted, by any feeder, and return their number. The end counts once Redis can
        no longer lose it. Tries again while Redis is away or full. Raises InvalidInput if all of an epoch failed."""
        end_position: int | None = None
        while True:
            try:
                position, is_end = await self._feed()
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot feed: %s; trying again", error)
                await asyncio.sleep(RETRY_S)
            else:
                if is_end and position == end_position:
                    return position
                end_position = position if is_end else None
            await asyncio.sleep(POLL_S if end_position is None else self.loss_window_s)

    async def watch(self, is_over: Callable[[], Awaitable[bool]]) -> None:
        """Watch the dead letters of a dataset that is submitted, until `is_over`: a small one is submitted before the
        first prompt is tried. Raises InvalidInput if all prompts of an epoch were dead-lettered."""
        while True:
            try:
                await self._watch_dead_letters(await self._submit(0, []))
                if await is_over():
                    return
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot watch the dead letters: %s; trying again", error)
            await asyncio.sleep(WATCH_S)

    async def _feed(self) -> tuple[int, bool]:
        """Submit chunks until enough prompts wait. Returns the position, and whether it is the end."""
        position = await self._submit(0, [])
        while self.stream.num_prompts is None or position < self.stream.num_prompts:
            await self._watch_dead_letters(position)
            if self.curriculum is not None:
                await self.curriculum.show_rewards()
            num_pending = (await self.queue.stat()).pending_prompts
            room = self.config.max_pending - num_pending
            if room <= 0:
                if not self._has_waited:
                    self._has_waited = True
                    text = "%d prompts wait and dataset.max_pending is %d: submitting the next ones as they are leased"
                    logger.info(text, num_pending, self.config.max_pending)
                return position, False
            position = await self._submit_next(position, min(room, CHUNK_PROMPTS))
        return position, True

    async def _submit_next(self, position: int, max_prompts: int) -> int:
        """Submit the next prompts, as the order of the dataset or the user's sampler has them."""
        chunk = self.stream.chunk(position, max_prompts)
        if self.curriculum is None:
            return await self._submit(position, chunk)
        rows = self.curriculum.choose(len(chunk))
        chunk = [seeded(self.stream.prompts[row], self.stream.seed, position + place) for place, row in enumerate(rows)]
        after = await self._submit(position, chunk)
        if after == position + len(chunk):
            self.curriculum.remember(self._last_id, rows)
        return after

    async def _watch_dead_letters(self, position: int) -> None:
        """Pause the run if too many prompts are dead-lettered, and end the feed if all of an epoch were."""
        stat, reasons = await self.queue.stat(), await self.queue.dead_letter_reasons()
        num_prompts = self.stream.epoch_prompts
        if self._dead_before is None:
            self._dead_before = max(0, stat.dead_lettered - position)
        if stat.inserted == 0 and min(position, stat.dead_lettered - self._dead_before) >= num_prompts:
            counts = ", ".join(f"{count} with {reason}" for reason, count in sorted(reasons.items()))
            raise InvalidInput(
                f"dataset {self.config.name!r}",
                f"all {num_prompts} prompts of an epoch were dead-lettered ({counts}); correct them or rollout.prompt, "
                "and start a new run",
            )
        if (reason := self.dead_letters.reason_to_pause(stat.inserted, reasons)) and self.pause is not None:
            logger.error("the run pauses: %s", reason)
            await self.pause(reason)
            self.dead_letters.begin_again(stat.inserted, reasons)

    async def _submit(self, position: int, chunk: Sequence[Prompt]) -> int:
        with contextlib.ExitStack() as spans:
            if self.tracing.is_on:
                starts = [self.tracing.start("submit", data_source=prompt.data_source) for prompt in chunk]
                parents = [spans.enter_context(start) for start in starts]
                chunk = [replace(prompt, trace_parent=own) for prompt, own in zip(chunk, parents, strict=True)]
            payloads, priorities = [encode_prompt(prompt) for prompt in chunk], [prompt.priority for prompt in chunk]
            feed = await self.queue.feed(
                self.config.name, self.fingerprint, position, payloads, priorities, self.stream.epoch_prompts
            )
        if feed.fingerprint != self.fingerprint:
            raise ConfigError(
                f"dataset {self.config.name!r} had other rows, or another order, for its first {feed.position} "
                "prompts; give the same file and seed, or another dataset.name"
            )
        self._last_id = feed.last_id
        return feed.position
