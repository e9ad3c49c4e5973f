"""Notices: what the processes of a run want its users to know, such as a reward function that fails.

A process hands an event to `NoticeBoard.post`, which never waits. The board writes its events to Redis once a second.
Events of the same kind and fingerprint are one notice, which keeps the text of the first event and counts the others.
The gateway shows the notices with the run. Resuming the run removes them. Processes that died and work again are shown
for SHOWN_S after the last time, and a lost server until it is back.

    reward_failed      a reward could not be computed, and the sample got `rollout.reward.error_value`
    default_reward     a data source is unknown, and is scored with `rollout.reward.default`
    prompt_failed      no group could be made from a prompt
    process_restarted  a process of a local run died, and `penstock up` started it again
    server_failed      a rollout server ended with an error, which may start again
    server_lost        a rollout server was silent for so long that the list of servers no longer has it
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from penstock.errors import PenstockError, QueueFull, Unavailable
from penstock.store.redis_client import RunRecords, guarded, read_known_fields
from penstock.store.reports import Notice

logger = logging.getLogger(__name__)
WRITE_S = 1.0
MAX_OF_KIND = 10
"""Largest number of notices of each kind, so that no kind hides another. Further ones are only in the logs."""
MAX_TEXT_CHARS = 500
SHOWN_S = 600.0
"""How long the end of a process is shown, if it does not end again. After it, Kubernetes takes it for healthy, too."""
PASSING_KINDS = ("process_restarted", "server_failed")
QUOTING_KINDS = ("reward_failed", "default_reward", "prompt_failed")
"""Kinds whose texts may quote any team's prompts, so only operators see them."""

NoticeKind = Literal[
    "reward_failed", "default_reward", "prompt_failed", "process_restarted", "server_failed", "server_lost"
]


@dataclass(frozen=True)
class Event:
    """One thing that happened. Events with the same kind and fingerprint are counted as one notice."""

    kind: NoticeKind
    fingerprint: str
    text: str
    """One line, which says what happened and what to do."""
    detail: str = ""
    """Further lines, such as a traceback."""

    def __post_init__(self) -> None:
        """Replace lone surrogates, which rewards and models may write and which UTF-8 and Redis' JSON do not have."""
        for name in ("fingerprint", "text", "detail"):
            object.__setattr__(self, name, getattr(self, name).encode("utf-8", "replace").decode())

    @property
    def key(self) -> str:
        return f"{self.kind}:{hashlib.sha256(self.fingerprint.encode()).hexdigest()[:16]}"


PostEvent = Callable[[Event], None]


def ignore_event(event: Event) -> None:
    """For processes that have no run, whose log is enough."""
    del event


class Notices(RunRecords):
    """The notices of one run."""

    async def record(self, event: Event, count: int = 1) -> None:
        fields = {"key": event.key, "kind": event.kind, "text": event.text[:MAX_TEXT_CHARS], "detail": event.detail}
        shown_ms = int(1000 * SHOWN_S) if event.kind in PASSING_KINDS else 0
        await self.call("record_notice", event.key, json.dumps(fields), count, MAX_OF_KIND, shown_ms)

    async def newest_first(self) -> list[Notice]:
        records = await self.hash_of(self.keys.notices)
        found = [read_known_fields(Notice, json.loads(text)) for text in records.values()]
        oldest_ms = 1000 * (time.time() - SHOWN_S)
        notices = [notice for notice in found if notice.kind not in PASSING_KINDS or notice.last_at_ms > oldest_ms]
        return sorted(notices, key=lambda notice: (-notice.last_at_ms, notice.text))

    async def remove(self, events: Iterable[Event]) -> None:
        """Remove the notices of these events, which are no longer true."""
        if keys := [event.key for event in events]:
            await guarded(self.client.hdel(self.keys.notices, *keys))


class NoticeBoard:
    """Collects the events of one process and writes them to Redis."""

    def __init__(self, notices: Notices) -> None:
        self.notices = notices
        self._events: dict[str, Event] = {}
        self._counts: Counter[str] = Counter()

    def post(self, event: Event) -> None:
        """Add an event. Once MAX_OF_KIND different ones of a kind wait, further ones are dropped."""
        num_waiting = sum(waiting.kind == event.kind for waiting in self._events.values())
        if event.key in self._events or num_waiting < MAX_OF_KIND:
            self._events.setdefault(event.key, event)
            self._counts[event.key] += 1

    async def write_loop(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            try:
                await self.write()
            except (QueueFull, Unavailable) as error:
                logger.warning("cannot write the run's notices yet: %s", error)

    async def write(self) -> None:
        """Write what waits. While Redis is away or full, events wait. An event that Redis refuses is only logged."""
        while self._events:
            key, event = next(iter(self._events.items()))
            count = self._counts[key]
            try:
                await self.notices.record(event, count)
            except (QueueFull, Unavailable):
                raise
            except PenstockError as error:
                logger.warning("a notice is dropped (%s): %s", error, event.text)
            self._counts[key] -= count
            if not self._counts[key]:
                del self._counts[key], self._events[key]
