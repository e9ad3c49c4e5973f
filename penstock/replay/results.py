"""A run's prompts as its clients see them: lists, cancellation, and the results in the order in which they came.

The results are a Redis stream, which the queue's scripts write. There is one entry for each append, which may hold many
groups, for each dead letter and for each cancellation. A cursor is the id of an entry and a place in it, for example
`1731657600000-0.3`. It stays valid until the entry is trimmed, after about 20,000 later entries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidInput
from penstock.replay.queue_types import PromptState, PromptStatus
from penstock.store.redis_client import QUEUE, RunRecords, guarded, read_record, read_rows
from penstock.trajectory import Group

MAX_IDS_READ = 2_000
"""Maximum number of ids that one call of `page` reads, because Redis answers no one else while the script runs."""
FROM_OLDEST = "0"
_CURSOR = re.compile(r"(\d{1,19}-\d{1,19})\.(\d{1,9})")
_AFTER_ENTRY = 999_999_999
_BEFORE_ALL = "0-0"
_STATES: dict[bytes, PromptState] = {b"queued": "queued", b"dead": "dead_lettered", b"cancelled": "cancelled"}


@dataclass(frozen=True)
class PromptsFound:
    prompts: tuple[PromptStatus, ...]
    after: int
    """The last id that was read."""
    has_more: bool


@dataclass(frozen=True)
class PromptResult:
    cursor: str
    prompt_id: int
    state: PromptState
    attempt: int
    reason: str


class PromptBook(RunRecords):
    """One run's prompts as its clients see them."""

    scripts = QUEUE

    async def page(self, after: int, limit: int, state: PromptState | None = None) -> PromptsFound:
        """List prompts by id, oldest first. A page may be short or empty and still have a next page."""
        page = read_record(await self.call("list_prompts", after, limit, state or "", MAX_IDS_READ))
        prompts = tuple(PromptStatus(**row | {"state": row["state"].decode()}) for row in read_rows(page["prompts"]))
        return PromptsFound(prompts, page["last_id"], bool(page["has_more"]))

    async def cancel(self, prompt_ids: Sequence[int]) -> list[PromptStatus | None]:
        """Cancel prompts whose groups the learner has not taken. Return what each is afterwards; None if unknown."""
        rows = read_rows(await self.call("cancel", *prompt_ids))
        return [
            PromptStatus(prompt_id, row["state"].decode(), row["attempt"], b"") if row["state"] else None
            for prompt_id, row in zip(prompt_ids, rows, strict=True)
        ]

    async def start(self, cursor: str) -> str:
        """Check a client's cursor and return it. An empty cursor becomes the position after the newest result."""
        if not cursor:
            newest = await self.newest_entry()
            return f"{newest}.{_AFTER_ENTRY}" if newest != _BEFORE_ALL else FROM_OLDEST
        if cursor == FROM_OLDEST:
            return cursor
        entry, _ = _parts(cursor)
        if not await guarded(self.client.xrange(self.keys.results, entry, entry)):
            raise InvalidInput("cursor", f"is no longer kept; start from {FROM_OLDEST!r}, and get older prompts by id")
        return cursor

    async def after(self, cursor: str, max_entries: int = 64) -> list[PromptResult]:
        entry, index = (_BEFORE_ALL, _AFTER_ENTRY) if cursor == FROM_OLDEST else _parts(cursor)
        entries = await guarded(self.client.xrange(self.keys.results, min=entry, count=max_entries))
        return [
            result
            for entry_id, fields in entries
            for place, result in enumerate(_results_of(entry_id, fields))
            if entry_id.decode() != entry or place > index
        ]

    async def newest_entry(self) -> str:
        """Id of the newest entry of the stream; `0-0` while it is empty."""
        newest = await guarded(self.client.xrevrange(self.keys.results, count=1))
        return newest[0][0].decode() if newest else _BEFORE_ALL

    async def wait_for_results(self, entry: str, timeout_s: float, max_entries: int = 64) -> list[PromptResult]:
        """Wait for entries after `entry` and return their results, or an empty list after `timeout_s`.

        Holds a Redis connection while it waits. `timeout_s` must be shorter than `redis.timeout_s`."""
        block_ms = max(1, int(1000 * timeout_s))
        answer = await guarded(self.client.xread({self.keys.results: entry}, count=max_entries, block=block_ms))
        return [result for _, entries in answer for entry in entries for result in _results_of(*entry)]


def entry_of(cursor: str) -> str:
    """Id of the stream's entry that a cursor is in; `0-0` for the cursor that reads from the oldest result."""
    return _BEFORE_ALL if cursor == FROM_OLDEST else _parts(cursor)[0]


def entry_order(entry: str) -> tuple[int, int]:
    """A key that sorts entry ids by age: `9-1` is older than `10-0`."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence)


def _parts(cursor: str) -> tuple[str, int]:
    match = _CURSOR.fullmatch(cursor)
    if match is None:
        raise InvalidInput("cursor", "was not issued by this service; send none to start now, or 0 for the oldest")
    return match[1], int(match[2])


def _results_of(entry_id: bytes, fields: dict[bytes, bytes]) -> list[PromptResult]:
    reason = fields.get(b"reason", b"").decode(errors="replace")
    name = next(name for name in fields if name in _STATES)
    results = []
    for place, word in enumerate(fields[name].split()):
        prompt_id, _, attempt = word.partition(b":")
        cursor = f"{entry_id.decode()}.{place}"
        results.append(PromptResult(cursor, int(prompt_id), _STATES[name], int(attempt or 0), reason))
    return results


KEPT_GROUPS = 4
KEPT_S = 900


class RecomputedLogProbs(RunRecords):
    """The learner's own log-probs of the tokens that it trains, to compare with the engine's. The learner writes those
    of KEPT_GROUPS groups of each step, and they expire after KEPT_S: for people to look at, not as a record."""

    async def keep(self, groups: Sequence[Group], log_probs: NDArray[np.float32]) -> None:
        """Keep the log-probs of the first groups. `log_probs` has one for each response token of all, in order."""
        start = 0
        for group in groups[:KEPT_GROUPS]:
            part = log_probs[start : start + group.num_response_tokens].astype("<f4").tobytes()
            start += group.num_response_tokens
            await guarded(self.client.set(self._key(group), part, ex=KEPT_S))

    async def get(self, group: Group) -> list[NDArray[np.float32]]:
        """One array per trajectory; an empty list if the group's log-probs were not kept or not recomputed."""
        data = await guarded(self.client.get(self._key(group)))
        if data is None or len(data) != 4 * group.num_response_tokens:
            return []
        ends = np.cumsum([len(trajectory.token_ids) for trajectory in group.trajectories])[:-1]
        return [part.astype(np.float32) for part in np.split(np.frombuffer(data, dtype="<f4"), ends)]

    def _key(self, group: Group) -> str:
        return self.keys.recomputed(group.prompt_id, group.attempt)
