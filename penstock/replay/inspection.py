"""The operator's view of a replay queue: shows every place, and requeues dead letters.

Reads change nothing and take nothing from the learner. `requeue` submits a dead-lettered prompt again, in one atomic
script; it does not need the learner's term, because it only adds a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from penstock.codec import decode_group, decode_prompt
from penstock.config.service import ReplayConfig
from penstock.errors import InvalidInput, NotFound, PoisonGroup
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat, kind_of
from penstock.store.redis_client import RedisClient, guarded, read_record, read_rows
from penstock.trajectory import Group, Prompt

DEAD_PAGE = 100
_PLACES = {
    "pending": "pending", "leased": "leased", "ready": "ready", "delivered": "delivered", "saved": "saved tokens",
    "eval_pending": "evaluation pending", "eval_leased": "evaluation leased", "dead": "dead letters",
}  # fmt: skip
"""Titles of the places that inspect_places.lua counts."""
_GROUP_PLACES = ("ready", "delivered")
DELETE_PAGE = 1000


@dataclass(frozen=True)
class QueuePlace:
    """A place of prompts or groups. None means that the place does not know it."""

    name: str
    count: int
    num_bytes: int | None = None
    oldest_age_s: float | None = None
    note: str = ""


@dataclass(frozen=True)
class QueueReport:
    run: str
    stat: QueueStat
    places: tuple[QueuePlace, ...]
    """Read a moment after `stat`, so a busy queue may show different counts here."""
    dead_letter_reasons: dict[str, int]
    """Counts over all dead letters that the run ever had, including letters requeued or purged since."""
    expired_reasons: dict[str, int]
    limits_known: bool
    """False if the run's config is unknown: then the admission fields of `stat` are meaningless."""


@dataclass(frozen=True)
class QueuedGroup:
    prompt_id: int
    num_bytes: int
    """Size as stored."""
    group: Group | None
    problem: str = ""
    """Why `group` is None. The learner will dead-letter it with this reason."""


@dataclass(frozen=True)
class StoredDeadLetter:
    stream_id: str
    prompt_id: int
    reason: str
    prompt_bytes: int
    group_bytes: int

    @property
    def time_ms(self) -> int:
        return int(self.stream_id.partition("-")[0])

    @property
    def kind(self) -> str:
        return kind_of(self.reason)


@dataclass(frozen=True)
class DeadLetterContents:
    letter: StoredDeadLetter
    prompt: Prompt | None
    group: Group | None
    group_problem: str


class QueueInspector:
    """One run's queue as an operator sees it. Without the run's `replay` config its limits are unknown."""

    def __init__(self, client: RedisClient, run: str, replay: ReplayConfig | None = None) -> None:
        self.client = client
        self.run = run
        self.knows_limits = replay is not None
        self.queue = RedisReplayQueue(client, run, replay or ReplayConfig())

    async def check_exists(self) -> None:
        if not (await self._places())["exists"]:
            raise NotFound(f"run {self.run!r} has no queue on this Redis; check the run's name and the address")

    async def report(self) -> QueueReport:
        stat = await self.queue.stat()
        found = await self._places()
        dead_age_s = (found["now_ms"] - found["oldest_dead_ms"]) / 1000 if found["oldest_dead_ms"] else None
        notes = {
            "pending": f"{found['returned']} back from a lost lease" if found["returned"] else "",
            "leased": f"{found['overdue']} overdue" if found["overdue"] else "",
            "delivered": f"taken since the checkpoint of step {stat.committed_step}" if found["delivered"] else "",
            "saved": "of leased or returned prompts",
        }
        ages = {name: await self._group_age_s(found[f"first_{name}"], found["now_ms"]) for name in _GROUP_PLACES}
        ages["dead"] = dead_age_s
        places = tuple(
            QueuePlace(title, found[name], found.get(f"{name}_bytes"), ages.get(name), notes.get(name, ""))
            for name, title in _PLACES.items()
        )
        reasons = await self.queue.dead_letter_reasons(), await self.queue.expired_reasons()
        return QueueReport(self.run, stat, places, *reasons, limits_known=self.knows_limits)

    async def queued_ids(
        self, selection: str = "fifo", limit: int = -1, *, include_delivered: bool = False
    ) -> list[int]:
        """Ready groups in the order in which the learner will take them, after the delivered ones if wanted."""
        ids: list[int] = await self.queue.call("inspect_queued", selection, limit, int(include_delivered))
        return ids

    async def groups(self, prompt_ids: Sequence[int]) -> list[QueuedGroup]:
        """Decoded groups in the given order. Groups that were committed meanwhile are skipped."""
        deliveries = await self.queue.fetch(prompt_ids)
        return await asyncio.to_thread(lambda: [_decode(found.prompt_id, found.payload) for found in deliveries])

    async def dead_letters(self, kind: str = "", *, newest_first: bool = False) -> AsyncIterator[StoredDeadLetter]:
        """The current dead letters without their payloads. Letters that are added while this runs are skipped."""
        page = await self._dead_letters("-", "+", 1, newest_first=True)
        first, last = "-", page[0].stream_id if page else ""
        while last:
            page = await self._dead_letters(first, last, DEAD_PAGE, newest_first=newest_first)
            for letter in page:
                if not kind or letter.kind == kind:
                    yield letter
            if len(page) < DEAD_PAGE:
                return
            beyond = f"({page[-1].stream_id}"
            first, last = (first, beyond) if newest_first else (beyond, last)

    async def dead_letter(self, stream_id: str) -> DeadLetterContents:
        _check_stream_id(stream_id)
        entries = await guarded(self.client.xrange(self.queue.keys.dead, stream_id, stream_id))
        if not entries:
            raise _no_dead_letter(stream_id)
        fields = {name.decode(): value for name, value in entries[0][1].items()}
        prompt, payload = fields.get("prompt", b""), fields.get("group", b"")
        prompt_id, reason = int(fields.get("prompt_id", 0)), fields.get("reason", b"").decode(errors="replace")
        decoded = await asyncio.to_thread(_decode, prompt_id, payload) if payload else None
        return DeadLetterContents(
            letter=StoredDeadLetter(stream_id, prompt_id, reason, len(prompt), len(payload)),
            prompt=decoded_prompt(prompt),
            group=decoded.group if decoded else None,
            group_problem=decoded.problem if decoded else "no group was kept with it",
        )

    async def requeue(self, stream_id: str) -> int:
        """Submit the letter's prompt under a new id and delete the letter, in one step. Returns the new id."""
        prompt = (await self.dead_letter(stream_id)).prompt
        if prompt is None:
            raise InvalidInput(stream_id, "holds no prompt that can be decoded; purge it and submit the prompt again")
        prompt_id: int = await self.queue.call("inspect_requeue", stream_id, prompt.priority)
        if not prompt_id:
            raise _no_dead_letter(stream_id)
        return prompt_id

    async def purge(self, stream_ids: Sequence[str]) -> int:
        """Delete dead letters. Returns how many were still there."""
        for stream_id in stream_ids:
            _check_stream_id(stream_id)
        num_deleted = 0
        for start in range(0, len(stream_ids), DELETE_PAGE):
            page = stream_ids[start : start + DELETE_PAGE]
            num_deleted += await guarded(self.client.xdel(self.queue.keys.dead, *page))
        return num_deleted

    async def _places(self) -> dict[str, int]:
        return read_record(await self.queue.call("inspect_places"))

    async def _group_age_s(self, prompt_id: int, now_ms: int) -> float | None:
        """Time since a group was finished; None if there is no group or its producer did not record the time."""
        found = await self.groups([prompt_id]) if prompt_id else []
        if not found or found[0].group is None or not found[0].group.finished_at_ms:
            return None
        return max(0.0, (now_ms - found[0].group.finished_at_ms) / 1000)

    async def _dead_letters(self, first: str, last: str, limit: int, *, newest_first: bool) -> list[StoredDeadLetter]:
        rows = read_rows(await self.queue.call("inspect_dead", first, last, limit, int(newest_first)))
        texts = ("stream_id", "reason")
        return [StoredDeadLetter(**row | {key: row[key].decode(errors="replace") for key in texts}) for row in rows]


def _decode(prompt_id: int, payload: bytes) -> QueuedGroup:
    try:
        return QueuedGroup(prompt_id, len(payload), decode_group(payload))
    except PoisonGroup as error:
        return QueuedGroup(prompt_id, len(payload), None, f"{error.kind}: {error}")


def decoded_prompt(payload: bytes) -> Prompt | None:
    """The prompt, or None if it no longer exists or cannot be decoded."""
    try:
        return decode_prompt(payload) if payload else None
    except (DecodeError, ValueError):
        return None


def _check_stream_id(stream_id: str) -> None:
    milliseconds, dash, sequence = stream_id.partition("-")
    if not (dash and milliseconds.isdecimal() and sequence.isdecimal()):
        raise InvalidInput(repr(stream_id), "is not the id of a dead letter; `penstock queue dlq` lists them")


def _no_dead_letter(stream_id: str) -> NotFound:
    return NotFound(f"there is no dead letter {stream_id}; `penstock queue dlq` lists them")
