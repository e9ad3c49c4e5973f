"""A session store in memory. It keeps the contract of `SessionStore`, for a single owner."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.config.service import SessionLimits
from penstock.errors import Conflict, NotFound, QueueFull
from penstock.sessions.session_store import Closing, Reward
from penstock.store.ownership import RUN_ITSELF, Owner


@dataclass
class _Session:
    list_name: str = ""
    calls: list[bytes] = field(default_factory=list)
    reward: Reward | None = None
    prompt_ids: tuple[int, ...] | None = None


class MemorySessionStore:
    def __init__(self, limits: SessionLimits | None = None) -> None:
        self.limits = limits or SessionLimits()
        self._sessions: dict[str, _Session] = {}

    async def open(
        self, session_id: str, list_name: str = "", num_known: int = 0, owner: Owner = RUN_ITSELF
    ) -> tuple[str, list[bytes]]:
        await asyncio.sleep(0)  # Other calls go on meanwhile, as they do while Redis answers.
        session = self._sessions.get(session_id, _Session())
        if session.reward is not None:
            raise Conflict(f"session {session_id!r} already has its reward; choose another id for new calls")
        return session.list_name, session.calls[num_known if session.list_name == list_name else 0 :]

    async def record(
        self, session_id: str, entry: bytes, call_id: str, list_name: str = "", owner: Owner = RUN_ITSELF
    ) -> None:
        session = self._sessions.setdefault(session_id, _Session())
        if session.reward is not None:
            raise Conflict(f"session {session_id!r} got its reward while it was answered; the answer is not recorded")
        if list_name and session.list_name != list_name:
            raise Conflict(f"session {session_id!r} has expired; begin it again, or raise gateway.session_ttl_s")
        num_bytes = sum(map(len, session.calls)) + len(entry)
        if len(session.calls) >= self.limits.max_calls or num_bytes > self.limits.max_bytes:
            raise Conflict(f"session {session_id!r} has reached a limit of gateway.sessions; give it its reward")
        total = sum(len(call) for each in self._sessions.values() for call in each.calls)
        if total + len(entry) > self.limits.max_total_bytes:
            raise QueueFull("all sessions together have reached gateway.sessions.max_total_bytes")
        session.list_name = session.list_name or call_id
        session.calls.append(entry)

    async def calls(self, session_id: str) -> list[bytes]:
        return list(self._sessions.get(session_id, _Session()).calls)

    async def reward(self, session_id: str) -> Reward | None:
        return self._sessions.get(session_id, _Session()).reward

    async def owner(self, session_id: str) -> str:
        return ""

    async def answer(self, session_id: str) -> tuple[int, ...] | None:
        return self._sessions.get(session_id, _Session()).prompt_ids

    async def close(self, session_id: str, reward: Reward, task_id: str = "", owner: Owner = RUN_ITSELF) -> Closing:
        if task_id:
            raise NotFound(f"there is no task {task_id!r}; this store has none")
        session = self._sessions.get(session_id, _Session())
        if session.prompt_ids is not None:
            return Closing("answered", prompt_ids=session.prompt_ids)
        if not session.calls:
            raise NotFound(f"session {session_id!r} has no calls; send its id as X-Penstock-Session with them")
        session.reward = session.reward or reward
        return Closing("closed", session.reward)

    async def finish(self, name: str, session_ids: Sequence[str], prompt_ids: Sequence[int]) -> tuple[int, ...]:
        first = self._sessions[session_ids[0]].prompt_ids if session_ids else None
        answer = tuple(prompt_ids) if first is None else first
        for session_id in session_ids:
            session = self._sessions[session_id]
            session.prompt_ids = answer
            session.calls.clear()
        return answer
