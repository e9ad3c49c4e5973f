"""Workers, harnesses and clients of tasks and sessions that record every call, for two owners.

They call the stores that the gateway calls, in a run of their own, so that no gateway sweeps it: the workers do. A
worker forgets its leases at times, as one that was killed, and they run out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.config.service import SessionLimits
from penstock.errors import Conflict, NotFound
from penstock.sessions.session_store import Reward, SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.ownership import Owner
from penstock.v1 import tasks_pb2
from support.linearizability.checker import Call
from support.linearizability.task_model import TaskDetails, TaskHistory

if TYPE_CHECKING:
    from support.linearizability.recorded_run import Recorder, Timed

RUN = "linear-tasks"
LIMITS = SessionLimits(task_lease_s=0.5, task_max_failures=2)
SESSION_TTL_S = 1
TASK_TTL_S = 600
"""Sessions of tasks must not expire, since the model of a task does not know that."""
OWNERS = ("alice", "bob")
MAX_PAUSE_S = 0.02
CALLS = {"submit", "lease", "heartbeat", "give_back", "open", "record", "close", "finish", "get"}
"""Calls that every history has."""


class RecordedTasks:
    """`clients` work until `may_go_on` returns False."""

    def __init__(
        self, client: Any, recorder: Recorder, may_go_on: Callable[[], Awaitable[bool]], is_up: asyncio.Event
    ) -> None:
        self.recorder, self.may_go_on, self.is_up = recorder, may_go_on, is_up
        self.tasks = TaskStore(client, RUN, TASK_TTL_S, LIMITS)
        self.leased = SessionStore(client, RUN, TASK_TTL_S, LIMITS)
        self.free = SessionStore(client, RUN, SESSION_TTL_S, LIMITS)
        self.history = TaskHistory(LIMITS.task_lease_s, SESSION_TTL_S, LIMITS.task_max_failures)
        self.owners: dict[str, str] = {}
        self.num_groups = 0

    @property
    def clients(self) -> list[Callable[[str, random.Random], Awaitable[None]]]:
        return [self._task_client, self._task_worker, self._task_worker, self._harness, self._harness]

    @property
    def called(self) -> set[str]:
        return {call.name for calls in self.history.calls.values() for call in calls}

    def problems(self) -> list[str]:
        return self.history.problems()

    async def end(self) -> None:
        """Read every task."""
        for name, owner in self.owners.items():
            await self._get("end", name, owner)

    async def _timed(self, call: Coroutine[Any, Any, Any]) -> Timed:
        return await self.recorder.timed(call, self.is_up)

    def _add(self, client: str, call: str, name: str, timed: Timed, details: TaskDetails) -> None:
        outcome = None if timed.is_lost else details.outcome or timed.answer
        details = replace(details, outcome=outcome)
        text = f"{details.session or name} by {details.owner} = {'?' if outcome is None else outcome}"
        recorded = Call(client, call, timed.called_s, timed.returned_s, details, text, timed.latest_s)
        self.history.calls.setdefault(name, []).append(recorded)

    # ── tasks ──

    async def _task_client(self, client: str, dice: random.Random) -> None:
        """Submit tasks, repeat submissions of the newest, by a stranger too, and read them."""
        while await self.may_go_on():
            if not self.owners or dice.random() < 0.2:
                name = f"t{len(self.owners)}"
                self.owners[name], self.history.sizes[name] = dice.choice(OWNERS), dice.randint(1, 3)
            else:
                name = dice.choice(list(self.owners)[-8:])
            owner = self.owners[name] if dice.random() < 0.8 else dice.choice(OWNERS)
            if dice.random() < 0.5:
                await self._submit(client, name, owner)
            else:
                await self._get(client, name, owner)
            await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S))

    async def _submit(self, client: str, name: str, owner: str) -> None:
        task = tasks_pb2.NewTask(task_id=name, payload_json="1", num_sessions=self.history.sizes[name])

        async def submit() -> str:
            try:
                _, is_replayed = await self.tasks.submit([task], f"key-{name}", owner=Owner(owner, sees_all=False))
            except Conflict:
                return "taken"
            return "replayed" if is_replayed else "stored"

        self._add(client, "submit", name, await self._timed(submit()), TaskDetails(owner))

    async def _get(self, client: str, name: str, owner: str) -> tasks_pb2.Task | None:
        found: list[tasks_pb2.Task] = []

        async def get() -> Any:
            try:
                task = await self.tasks.get(name, Owner(owner, sees_all=False))
            except NotFound:
                return "missing"
            found.append(task)
            counts = task.num_rewarded, task.num_failed
            state = tasks_pb2.Task.State.Name(task.state).lower()
            return state, *counts, tuple(task.session_ids), next(iter(task.prompt_ids), 0)

        self._add(client, "get", name, await self._timed(get()), TaskDetails(owner))
        return found[0] if found else None

    async def _task_worker(self, client: str, dice: random.Random) -> None:
        owner = OWNERS[int(client[-1]) % 2]
        held: list[str] = []
        while await self.may_go_on():
            await self._timed(self.tasks.sweep())
            held += await self._lease(client, owner, dice.randint(1, 3))
            for session in dice.sample(held, min(len(held), 3)):
                await self._work(client, session, owner, dice)
            if dice.random() < 0.1:  # a worker that is killed with its leases
                held = []
            await asyncio.sleep(dice.uniform(0, MAX_PAUSE_S))

    async def _lease(self, client: str, owner: str, count: int) -> list[str]:
        timed = await self._timed(self.tasks.lease(client, count, 1000, Owner(owner, sees_all=False)))
        if timed.is_lost:
            details = TaskDetails(owner)
            call = Call(client, "lease", timed.called_s, timed.returned_s, details, "?", timed.latest_s)
            self.history.lost_leases.append(call)
            return []
        for row in timed.answer:
            details = TaskDetails(owner, place=int(row.session_id.split(".")[1]), outcome=row.session_id)
            self._add(client, "lease", row.task_id, timed, details)
        return [row.session_id for row in timed.answer]

    async def _work(self, client: str, session: str, owner: str, dice: random.Random) -> None:
        name = session.split(".", maxsplit=1)[0]
        owner = owner if dice.random() < 0.9 else dice.choice(OWNERS)
        action = dice.random()
        if action < 0.15:

            async def beat() -> str:
                return "lost" if await self.tasks.heartbeat([session], Owner(owner, sees_all=False)) else "held"

            self._add(client, "heartbeat", name, await self._timed(beat()), TaskDetails(owner, session))
        elif action < 0.3:
            failure = dice.choice(["", "broken"])

            async def give_back() -> str:
                return "held" if await self.tasks.give_back(session, failure, Owner(owner, sees_all=False)) else "lost"

            details = TaskDetails(owner, session, failure=failure)
            self._add(client, "give_back", name, await self._timed(give_back()), details)
        elif action < 0.65:
            await self._call(client, self.leased, name, session, owner, dice)
        else:
            await self._reward(client, self.leased, name, session, owner, dice)

    # ── sessions ──

    async def _harness(self, client: str, dice: random.Random) -> None:
        """Begin sessions, continue and reward them, as both owners. Others are left to expire."""
        while await self.may_go_on():
            known = [name for name, size in self.history.sizes.items() if size == 0]
            name = f"s{len(known)}" if not known or dice.random() < 0.1 else dice.choice(known[-6:])
            self.history.sizes[name] = 0
            owner = OWNERS[int(name[1:]) % 2] if dice.random() < 0.9 else dice.choice(OWNERS)
            if dice.random() < 0.75:
                await self._call(client, self.free, name, name, owner, dice)
            else:
                await self._reward(client, self.free, name, name, owner, dice)
            await asyncio.sleep(dice.uniform(0, 2 * MAX_PAUSE_S))

    async def _call(
        self, client: str, store: SessionStore, name: str, session: str, owner: str, dice: random.Random
    ) -> None:
        """Open a session and record a call, which mostly refers to the calls before it."""

        async def open_session() -> Any:
            try:
                list_name, entries = await store.open(session, owner=Owner(owner, sees_all=False))
            except (Conflict, NotFound) as error:
                return _refusal(error)
            return list_name, len(entries)

        timed = await self._timed(open_session())
        self._add(client, "open", name, timed, TaskDetails(owner, session))
        list_name = timed.answer[0] if isinstance(timed.answer, tuple) and dice.random() < 0.8 else ""
        call_id = f"{client}-{dice.randrange(10**9)}"

        async def record() -> str:
            try:
                await store.record(session, b"call", call_id, list_name, Owner(owner, sees_all=False))
            except (Conflict, NotFound) as error:
                return _refusal(error)
            return "recorded"

        details = TaskDetails(owner, session, call_id=call_id, list_name=list_name)
        self._add(client, "record", name, await self._timed(record()), details)

    async def _reward(
        self, client: str, store: SessionStore, name: str, session: str, owner: str, dice: random.Random
    ) -> None:
        """Reward a session, often twice, and finish its group if that is to do, as two gateways may."""
        for _ in range(dice.choice([1, 1, 2])):
            reward = float(dice.randrange(100))

            async def close(reward: float = reward) -> Any:
                try:
                    closing = await store.close(session, Reward(reward, {}), owner=Owner(owner, sees_all=False))
                except NotFound:
                    return "missing"
                if closing.state == "answered":
                    return "answered", next(iter(closing.prompt_ids), 0)
                return closing.state if closing.reward is None else (closing.state, closing.reward.reward)

            timed = await self._timed(close())
            self._add(client, "close", name, timed, TaskDetails(owner, session, reward=reward))
            is_closed = isinstance(timed.answer, tuple) and timed.answer[0] == "closed"
            if is_closed and dice.random() < 0.6:
                for _ in range(dice.choice([1, 2])):
                    await self._finish(client, store, name, f"session:{name}", (session,))
            elif timed.answer == "complete":
                task = await self._get(client, name, self.owners[name])
                if task is not None:
                    for _ in range(dice.choice([1, 2])):
                        await self._finish(client, store, name, f"task:{name}", tuple(task.session_ids))

    async def _finish(self, client: str, store: SessionStore, name: str, group: str, sessions: tuple[str, ...]) -> None:
        self.num_groups += 1
        prompt_id = self.num_groups

        async def finish() -> int:
            return (await store.finish(group, sessions, [prompt_id]))[0]

        timed = await self._timed(finish())
        self._add(client, "finish", name, timed, TaskDetails("", group=prompt_id, sessions=sessions))


def _refusal(error: Exception) -> str:
    if isinstance(error, NotFound):
        return "foreign"
    return "gone" if "has expired" in str(error) else "closed"
