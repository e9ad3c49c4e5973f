"""The recorded calls of a run's sessions in Redis.

A session is open until its first reward. That closes it: its calls no longer change, so whoever makes it a group, and
however often, makes the same group. It is finished when the group is in the queue; then its calls are forgotten, and
the answer to its reward is kept.

    open ──record──► open ──close──► closed ──finish──► finished

Sessions are bounded. A session without a new call or a reward expires after `ttl_s`, and each limit of
`gateway.sessions` refuses further calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from penstock.config.service import SessionLimits
from penstock.errors import Conflict, NotFound, QueueFull
from penstock.store.ownership import RUN_ITSELF, Owner
from penstock.store.redis_client import SESSIONS, RunRecords, guarded, read_rows
from penstock.v1 import sessions_pb2

RETRY_S = 10.0
"""A gateway that has not finished a rewarded session by then is assumed dead, and another one finishes it."""
_ABANDONED = 2
_FOREIGN = 3


@dataclass(frozen=True)
class Reward:
    reward: float
    parts: Mapping[str, float]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Reward:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Closing:
    """What `close` has found, and what is to do."""

    state: Literal["closed", "joined", "complete", "answered"]
    """closed: the session becomes its own group. joined: it is part of a task that waits for others. complete: it
    was the last session of its task. answered: nothing is to do."""
    reward: Reward | None = None
    """If it is closed: the reward that counts, which is the first one that was given."""
    task_id: str = ""
    """The task, if it is complete."""
    prompt_ids: tuple[int, ...] = ()
    """Prompts of the groups that the session has become. None if its task had ended, or another had its place."""


def _summary(row: Mapping[str, Any]) -> sessions_pb2.SessionSummary:
    """A session, without its calls. One that was abandoned has no reward."""
    reward = Reward.decode(row["reward"]) if row["reward"] else None
    return sessions_pb2.SessionSummary(
        session_id=row["session_id"].decode(),
        state="FINISHED" if row["answer"] else "OPEN" if reward is None else "REWARDED",
        reward=None if reward is None else reward.reward,
        reward_parts={} if reward is None else reward.parts,
        prompt_ids=json.loads(row["answer"] or "[]"),
        task_id=row["task_id"].decode(),
        num_calls=row["num_calls"],
        num_bytes=row["num_bytes"],
    )


def _not_found(session_id: str) -> NotFound:
    return NotFound(f"there is no session {session_id!r} of this key, or it is forgotten after gateway.session_ttl_s")


class SessionStore(RunRecords):
    """The sessions of one run."""

    scripts = SESSIONS

    def __init__(self, client: Any, run: str, ttl_s: float, limits: SessionLimits) -> None:
        super().__init__(client, run)
        self.ttl_s = max(1, int(ttl_s))
        self.limits = limits

    async def open(
        self, session_id: str, list_name: str = "", num_known: int = 0, owner: Owner = RUN_ITSELF
    ) -> tuple[str, list[bytes]]:
        """The name of the session's list of calls, empty if it has none, and the encoded calls. If it is still the list
        that the caller knows, only the calls after the first `num_known`. Raises Conflict if the session is closed."""
        lease_ms = int(1000 * self.limits.task_lease_s)
        given = (session_id, list_name, num_known, lease_ms, *owner.arguments)
        closed, name, entries = await self.call("open_session", *given)
        if closed == _FOREIGN:
            raise _not_found(session_id)
        if closed == _ABANDONED:
            raise Conflict(f"session {session_id!r} has lost its place in its task; lease another one")
        if closed:
            raise Conflict(f"session {session_id!r} already has its reward; choose another id for new calls")
        return name.decode(), entries

    async def record(
        self, session_id: str, entry: bytes, call_id: str, list_name: str = "", owner: Owner = RUN_ITSELF
    ) -> None:
        """Add an encoded call. If it refers to earlier calls, `list_name` is the name of their list. Raises Conflict if
        the session is closed or has expired, and QueueFull beyond a limit."""
        limits = self.limits
        outcome = await self.call(
            "record_call", session_id, entry, call_id, list_name,
            self.ttl_s, limits.max_calls, limits.max_bytes, limits.max_total_bytes, *owner.arguments,
        )  # fmt: skip
        if outcome == b"foreign":
            raise _not_found(session_id)
        if outcome == b"expired":
            raise Conflict(f"session {session_id!r} has expired; begin it again, or raise gateway.session_ttl_s")
        if outcome == b"closed":
            raise Conflict(f"session {session_id!r} got its reward while it was answered; the answer is not recorded")
        if outcome in (b"long", b"large"):
            limit = "max_calls" if outcome == b"long" else "max_bytes"
            raise Conflict(f"session {session_id!r} has reached gateway.sessions.{limit}; give it its reward")
        if outcome == b"full":
            raise QueueFull(
                "all sessions together have reached gateway.sessions.max_total_bytes; reward open sessions, or raise it"
            )

    async def calls(self, session_id: str) -> list[bytes]:
        entries: list[bytes] = await guarded(self.client.lrange(self.keys.session(session_id, "calls"), 0, -1))
        return entries

    async def reward(self, session_id: str) -> Reward | None:
        """The reward of a session; None if it is open or unknown."""
        text = await guarded(self.client.hget(self.keys.session(session_id, "state"), "reward"))
        return Reward.decode(text) if text else None

    async def read(self, session_id: str, owner: Owner = RUN_ITSELF) -> tuple[sessions_pb2.SessionSummary, list[bytes]]:
        """A session and its calls, for people to look at. Unlike `open`, it renews no lease."""
        rows, entries = await self.call("read_session", session_id)
        [row] = read_rows(rows)
        summary = _summary(row)
        is_empty = summary.state == sessions_pb2.SessionSummary.OPEN and not entries
        if is_empty or not owner.may_use(row["owner"].decode()):
            raise _not_found(session_id)
        return summary, entries

    async def summaries(
        self, num_skipped: int, max_sessions: int, owner: Owner = RUN_ITSELF
    ) -> tuple[list[sessions_pb2.SessionSummary], bool]:
        """The owner's sessions among the next ones whose calls are kept, the one with the newest call first. Also
        returns whether more sessions follow."""
        rows = list(read_rows(await self.call("list_sessions", num_skipped, max_sessions + 1)))
        shown = [_summary(row) for row in rows[:max_sessions] if owner.may_use(row["owner"].decode())]
        return shown, len(rows) > max_sessions

    async def owner(self, session_id: str) -> str:
        return (await guarded(self.client.hget(self.keys.session(session_id, "state"), "owner")) or b"").decode()

    async def answer(self, session_id: str) -> tuple[int, ...] | None:
        """Prompts of the groups that a session has become; None if it is not finished."""
        text = await guarded(self.client.hget(self.keys.session(session_id, "state"), "answer"))
        return tuple(json.loads(text)) if text else None

    async def close(self, session_id: str, reward: Reward, task_id: str = "", owner: Owner = RUN_ITSELF) -> Closing:
        """Give the session its reward. It joins the task that it was leased with, or else `task_id`."""
        state, value = await self.call(
            "close_session", session_id, reward.encode(), self.ttl_s, int(1000 * RETRY_S), task_id, *owner.arguments
        )
        if state == b"missing":
            raise NotFound(f"session {session_id!r} has no calls; send its id as X-Penstock-Session with them")
        if state == b"unknown":
            raise NotFound(f"there is no task {task_id!r}; submit it first")
        if state == b"answered":
            return Closing("answered", prompt_ids=tuple(json.loads(value)))
        if state == b"complete":
            return Closing("complete", task_id=value.decode())
        return Closing("closed" if state == b"closed" else "joined", Reward.decode(value))

    async def finish(self, name: str, session_ids: Sequence[str], prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The group `name` (session:ID or task:ID) of these sessions is in the queue. Returns its prompt ids, which are
        those of whoever finished it first."""
        ids = json.dumps(list(prompt_ids))
        return tuple(json.loads(await self.call("finish_sessions", name, ids, self.ttl_s, *session_ids)))

    async def due(self, max_names: int = 16) -> list[str]:
        """Closed sessions and complete tasks (session:ID, task:ID) that another gateway should have finished."""
        names = await self.call("due_groups", int(1000 * RETRY_S), max_names)
        return [name.decode() for name in names]
