"""Tasks in Redis: work for harnesses, of which each wants a number of sessions with rewards.

A task has a place for each session that it wants. A place is always in exactly one of these states:

    pending ──lease──► leased ──reward──► rewarded
       ▲                 │
       └── give back, ───┤           a failure counts, and so does a lease that ran out: its worker is assumed dead
           lease expiry  └─► failed  after `max_failures`
    pending, leased ──────► dropped  the task's deadline has passed

so `submitted = pending + leased + rewarded + failed + dropped` at every moment. A place is leased with a session id of
its own for each attempt. The first reward of a place counts, whichever attempt it comes from; others are abandoned.

    pending ──first lease──► open ──every place rewarded or failed, or the deadline──► complete ──► finished
                              └──────────── the same, with no reward at all ──────────► failed

A complete task becomes one group of its rewarded sessions: see SessionStore.due and finish.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from penstock.config.service import SessionLimits
from penstock.errors import Conflict, NotFound, QueueFull
from penstock.sessions.session_store import RETRY_S
from penstock.store.ownership import RUN_ITSELF, Owner
from penstock.store.redis_client import SESSIONS, RunRecords, guarded, read_record, read_rows
from penstock.v1 import tasks_pb2

IDEMPOTENCY_TTL_S = 7 * 24 * 3600


@dataclass(frozen=True)
class TaskStat:
    """Counts of places, tasks and sessions at one moment."""

    submitted: int
    pending: int
    leased: int
    rewarded: int
    failed: int
    dropped: int
    reclaimed: int
    open_tasks: int
    failed_tasks: int
    finished_tasks: int
    sessions: int
    session_bytes: int

    @property
    def conservation_error(self) -> int:
        return self.submitted - self.pending - self.leased - self.rewarded - self.failed - self.dropped


class TaskStore(RunRecords):
    """The tasks of one run."""

    scripts = SESSIONS

    def __init__(self, client: Any, run: str, ttl_s: float, limits: SessionLimits) -> None:
        super().__init__(client, run)
        self.limits = limits
        self._ends = (limits.task_max_failures, max(1, int(ttl_s)), int(1000 * RETRY_S))

    async def submit(
        self, tasks: Sequence[tasks_pb2.NewTask], idempotency_key: str = "", digest: str = "",
        owner: Owner = RUN_ITSELF, bodies: Sequence[str] = (),
    ) -> tuple[list[str], bool]:  # fmt: skip
        """Accept all tasks or none. Returns their ids, and whether the owner has used the key before, which is bound to
        the digest. A task that exists is kept, if it has the same body: what was asked for, by default the task."""
        rows: list[Any] = []
        for task, body in zip(tasks, bodies or tasks, strict=True):
            asked, deadline_ms = blake2b(str(body).encode(), digest_size=16).hexdigest(), int(1000 * task.deadline_s)
            rows += (task.task_id, task.num_sessions, deadline_ms, task.data_source, task.payload_json, asked)
        key = (idempotency_key, owner.name, digest, IDEMPOTENCY_TTL_S)
        answer = await self.call("submit_tasks", *key, self.limits.max_task_places, *rows)
        if answer == b"other":
            raise Conflict("idempotency_key was used for other tasks before; choose a new key")
        if answer[0] == b"taken":
            raise Conflict(f"task {answer[1].decode()!r} is another key's, or not the same; choose another id")
        if answer == b"full":
            raise QueueFull("as many tasks wait as gateway.sessions.max_task_places allows; submit again later")
        replayed, ids = answer
        return [task_id.decode() for task_id in ids], bool(replayed)

    async def lease(
        self, worker: str, max_places: int, max_open: int, owner: Owner = RUN_ITSELF
    ) -> list[tasks_pb2.LeasedTask]:
        """Lease places in the order of submission. New tasks are begun while fewer than `max_open` are open."""
        lease_s = self.limits.task_lease_s
        times = (int(1000 * lease_s), max_open, *self._ends)
        answer = await self.call("lease_tasks", worker, max_places, *times, *owner.arguments)
        return [
            tasks_pb2.LeasedTask(payload_json=row.pop("payload"), lease_s=lease_s, **row) for row in read_rows(answer)
        ]

    async def heartbeat(self, session_ids: Sequence[str], owner: Owner = RUN_ITSELF) -> list[str]:
        """Renew leases. Returns the sessions whose lease is lost."""
        lease_ms = int(1000 * self.limits.task_lease_s)
        lost = await self.call("heartbeat_tasks", lease_ms, *owner.arguments, *session_ids)
        return [session_id.decode() for session_id in lost]

    async def give_back(self, session_id: str, failure: str = "", owner: Owner = RUN_ITSELF) -> bool:
        """Give a place back and abandon its session. Returns whether the session held the lease."""
        return bool(await self.call("return_task", session_id, failure, *self._ends, *owner.arguments))

    async def sweep(self) -> tuple[int, int]:
        """Return the places of dead workers, and complete tasks whose deadline has passed. Returns both numbers."""
        num_reclaimed, num_due = await self.call("sweep_tasks", *self._ends)
        return num_reclaimed, num_due

    async def get(self, task_id: str, owner: Owner = RUN_ITSELF) -> tasks_pb2.Task:
        raw = await guarded(self.client.hgetall(self.keys.task(task_id)))
        if not raw or not owner.may_use(raw.get(b"owner", b"").decode()):
            raise NotFound(f"there is no task {task_id!r}; tasks are forgotten gateway.session_ttl_s after their end")
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        numbers = {name: int(fields[name]) for name in ("num_sessions", "num_rewarded", "num_failed")}
        places = (fields.get(f"rewarded:{place}") for place in range(numbers["num_sessions"]))
        return tasks_pb2.Task(
            task_id=task_id,
            state=fields["state"].upper(),
            payload_json=fields["payload"],
            data_source=fields["data_source"],
            session_ids=[session_id for session_id in places if session_id],
            prompt_ids=json.loads(fields.get("answer", "[]")),
            failure=fields.get("failure", ""),
            **numbers,
        )

    async def stat(self) -> TaskStat:
        return TaskStat(**read_record(await self.call("task_stat")))
