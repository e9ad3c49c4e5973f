"""Sessions and tasks of a run: rewards, sessions as people look at them, and the work that is handed to harnesses.

A session is shown as a tree of calls, with the tokens, their versions and the rewards of the paths. The whole tree is
always described. Its tokens are bounded, because a session may have millions of them.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from penstock.api import records
from penstock.api.conversion import message_of
from penstock.api.records import Page, Record
from penstock.codec import FINISH_TO_PROTO, sampling_to_proto
from penstock.errors import InvalidInput
from penstock.replay.queue import RedisReplayQueue
from penstock.reward_bounds import RANGE, is_reward
from penstock.samples import TokenText
from penstock.sessions.task_store import TaskStore
from penstock.store.fleet import RunControl
from penstock.store.keys import check_name
from penstock.v1 import sessions_pb2, tasks_pb2
from penstock_services.gateway import checks
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import IDEMPOTENCY_KEY, Handlers, body_digest, bounded, operation
from penstock_services.gateway.sessions.recorder import SessionRecorder
from penstock_services.gateway.sessions.rewards import SessionRewards
from penstock_services.gateway.sessions.tree import SessionTree

DEFAULT_TOKENS = 20_000
MAX_TOKENS = 100_000
MAX_SESSIONS = 1024
"""Largest number of sessions of one task."""
MAX_TASK_ID = 112
"""Longest id of a task. Its sessions are called TASK.PLACE.ATTEMPT, and names have at most 128 characters."""
MAX_WAIT_S = 30.0
POLL_S = 0.25


class OfRun(Record):
    """A request about sessions or tasks. Their paths do not name the run: a harness knows its gateway and its session,
    and OpenAI's and Anthropic's paths, which it calls as well, have no run either."""

    run: str = ""
    """The run; empty for the gateway's own."""


class ListSessions(Page):
    run: str = ""


class GetSession(OfRun):
    from_call: Annotated[int, Field(ge=0, lt=2**31, description="Number of the first call with tokens.")] = 0
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS, description="Tokens of all calls together; 0: 20,000.")] = 0


class RewardSession(OfRun):
    reward: float
    reward_parts: dict[str, float] = {}
    task_id: str = ""
    """The task of a session that was not leased with one; empty for none."""


class NewTaskRequest(Record):
    task_id: str = ""
    payload: Any = None
    num_sessions: Annotated[int, Field(ge=1, le=MAX_SESSIONS)] = 1
    deadline_s: Annotated[float, Field(ge=0)] = 0.0
    data_source: str = ""


class SubmitTasks(OfRun):
    tasks: tuple[NewTaskRequest, ...]
    idempotency_key: str = ""


class LeaseTasks(OfRun):
    worker: str
    max_tasks: Annotated[int, Field(ge=1, le=MAX_SESSIONS)] = 1
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = 0.0


class HeartbeatTasks(OfRun):
    session_ids: tuple[str, ...]


class ReturnTask(OfRun):
    session_id: str
    failure: str = ""


@dataclass
class SessionHandlers(Handlers):
    recorder: SessionRecorder
    rewards: SessionRewards
    texts: TokenText

    @operation("POST", "/v1/sessions/{session_id}/reward", "submit", records.RewardedSession, takes=RewardSession)
    async def reward_session(
        self, caller: Caller, request: sessions_pb2.RewardSessionRequest
    ) -> sessions_pb2.RewardSessionResponse:
        """Turn the session's recorded calls into training data with this reward."""
        check_name("session_id", request.session_id)
        for name, value in {"reward": request.reward, **request.reward_parts}.items():
            if not is_reward(value):
                raise InvalidInput(name, f"must be a number {RANGE}")
        if request.task_id:
            check_name("task_id", request.task_id)
        closing, ids = await self.rewards.give(
            request.session_id, request.reward, request.reward_parts, request.task_id, caller.owner
        )
        self.recorder.forget(request.session_id)
        return sessions_pb2.RewardSessionResponse(
            prompt_ids=ids, replayed=closing.state == "answered", is_waiting=closing.state == "joined"
        )

    @operation("GET", "/v1/sessions/{session_id}", "read", records.Session, takes=GetSession)
    async def get_session(self, caller: Caller, request: sessions_pb2.GetSessionRequest) -> sessions_pb2.Session:
        """A session as a tree of its calls. All calls are described; their tokens end at `max_tokens`."""
        check_name("session_id", request.session_id)
        if request.from_call < 0:
            raise InvalidInput("from_call", "must not be negative")
        if not 0 <= request.max_tokens <= MAX_TOKENS:
            raise InvalidInput("max_tokens", f"must be 0 to {MAX_TOKENS}; 0 takes {DEFAULT_TOKENS}")
        summary, entries = await self.recorder.store.read(request.session_id, caller.owner)
        max_tokens = request.max_tokens or DEFAULT_TOKENS
        return await asyncio.to_thread(self._describe, summary, entries, request.from_call, max_tokens)

    @operation("GET", "/v1/sessions", "read", records.SessionPage, takes=ListSessions)
    async def list_sessions(
        self, caller: Caller, request: sessions_pb2.ListSessionsRequest
    ) -> sessions_pb2.ListSessionsResponse:
        """List the sessions whose calls are kept, the one with the newest call first. A page may be short."""
        page_size = checks.page_size(request.page_size)
        first = int(checks.page_position("sessions", request.page_token, "[0-9]{1,9}") or 0)
        found, has_more = await self.recorder.store.summaries(first, page_size, caller.owner)
        token = checks.page_token("sessions", first + page_size) if has_more else ""
        return sessions_pb2.ListSessionsResponse(sessions=found, next_page_token=token)

    def _describe(
        self, summary: sessions_pb2.SessionSummary, entries: list[bytes], from_call: int, max_tokens: int
    ) -> sessions_pb2.Session:
        tree = SessionTree()
        tree.add(entries)
        answer = sessions_pb2.Session(summary=summary)
        for number, call in enumerate(tree.calls):
            if not call.call_id:  # It repeats another one.
                continue
            node = _node(tree, number)
            if number >= from_call and max_tokens > 0:
                max_tokens -= self._add_tokens(node, tree, number, max_tokens)
            answer.calls.append(node)
        for line, trained in tree.trained_paths():
            path = answer.paths.add(calls=line, trained_calls=sorted(trained))
            path.num_trained_tokens = sum(len(tree.calls[number].token_ids) for number in trained)
            if summary.HasField("reward"):
                path.reward = summary.reward
        return answer

    def _add_tokens(self, node: sessions_pb2.SessionNode, tree: SessionTree, number: int, max_tokens: int) -> int:
        """Add the first `max_tokens` tokens of a call. Returns how many it has added."""
        call = tree.calls[number]
        inserted = (tree.prompt_ids(number) if tree.parent(number) is None else call.extra)[:max_tokens]
        sampled = call.token_ids[: max_tokens - len(inserted)]
        node.inserted_token_ids = inserted.astype("<i4").tobytes()
        node.token_ids = sampled.astype("<i4").tobytes()
        node.log_probs = call.log_probs[: len(sampled)].astype("<f4").tobytes()
        versions = np.zeros(len(call.token_ids), dtype="<i8")
        for segment in call.segments:
            versions[segment.start : segment.end] = segment.policy_version
        node.policy_versions = versions[: len(sampled)].tobytes()
        if self.texts.is_known:
            node.inserted_tokens[:] = self.texts.tokens(inserted.tolist())
            node.tokens[:] = self.texts.tokens(sampled.tolist())
        return len(inserted) + len(sampled)


def _node(tree: SessionTree, number: int) -> sessions_pb2.SessionNode:
    call, parent = tree.calls[number], tree.parent(number)
    num_before = 0 if parent is None else tree.calls[parent].num_tokens
    return message_of(
        sessions_pb2.SessionNode, call, number=number, parent=-1 if parent is None else parent,
        finish_reason=FINISH_TO_PROTO[call.finish_reason], sampling=sampling_to_proto(call.sampling),
        num_inserted=call.num_prompt_tokens - num_before, num_sampled=len(call.token_ids), token_ids=b"", log_probs=b"",
    )  # fmt: skip


@dataclass
class TaskHandlers(Handlers):
    tasks: TaskStore
    queue: RedisReplayQueue
    control: RunControl

    @operation("POST", "/v1/tasks", "submit", records.SubmittedTasks, takes=SubmitTasks, header=IDEMPOTENCY_KEY)
    async def submit_tasks(
        self, caller: Caller, request: tasks_pb2.SubmitTasksRequest
    ) -> tasks_pb2.SubmitTasksResponse:
        """Submit tasks for workers: all are accepted, or none. Each wants `num_sessions` rewarded sessions."""
        limit = self.config.gateway.max_prompts_per_request
        if not 1 <= len(request.tasks) <= limit:
            raise InvalidInput("tasks", f"must be 1 to {limit} tasks")
        checks.keys(request.idempotency_key, (), len(request.tasks))
        checked = [self._checked(task, f"tasks[{number}].") for number, task in enumerate(request.tasks)]
        tasks, bodies = zip(*checked, strict=True)
        if len({task.task_id for task in tasks}) < len(tasks):
            raise InvalidInput("tasks", "must have different ids")
        digest = body_digest(request.tasks)
        task_ids, replayed = await self.tasks.submit(tasks, request.idempotency_key, digest, caller.owner, bodies)
        return tasks_pb2.SubmitTasksResponse(task_ids=task_ids, replayed=replayed)

    @operation("GET", "/v1/tasks/{task_id}", "read", records.Task, takes=OfRun)
    async def get_task(self, caller: Caller, request: tasks_pb2.GetTaskRequest) -> tasks_pb2.Task:
        check_name("task_id", request.task_id)
        return await self.tasks.get(request.task_id, caller.owner)

    @operation("POST", "/v1/tasks:lease", "submit", records.LeasedTasks, takes=LeaseTasks, keeps_deadline=True)
    async def lease_tasks(self, caller: Caller, request: tasks_pb2.LeaseTasksRequest) -> tasks_pb2.LeaseTasksResponse:
        """Hand places of tasks to a worker, each with the id of the session to use for it."""
        check_name("worker", request.worker)
        if not 0 <= request.max_tasks <= MAX_SESSIONS:
            raise InvalidInput("max_tasks", f"must be 0 to {MAX_SESSIONS}")
        if not 0 <= request.wait_s <= MAX_WAIT_S:
            raise InvalidInput("wait_s", f"must be 0 to {MAX_WAIT_S:g}")
        deadline = time.monotonic() + request.wait_s
        while True:
            leases = await bounded(self._lease(request, caller), self.deadline_s)
            if leases or time.monotonic() + POLL_S > deadline:
                break
            await asyncio.sleep(POLL_S)
        return tasks_pb2.LeaseTasksResponse(tasks=leases)

    @operation("POST", "/v1/tasks:heartbeat", "submit", records.LostTasks, takes=HeartbeatTasks)
    async def heartbeat_tasks(
        self, caller: Caller, request: tasks_pb2.HeartbeatTasksRequest
    ) -> tasks_pb2.HeartbeatTasksResponse:
        """Renew the leases of sessions. Their generate calls do so too."""
        for number, session_id in enumerate(request.session_ids):
            check_name(f"session_ids[{number}]", session_id)
        lost = await self.tasks.heartbeat(list(request.session_ids), caller.owner)
        return tasks_pb2.HeartbeatTasksResponse(lost_session_ids=lost)

    @operation("POST", "/v1/tasks:return", "submit", records.ReturnedTask, takes=ReturnTask)
    async def return_task(self, caller: Caller, request: tasks_pb2.ReturnTaskRequest) -> tasks_pb2.ReturnTaskResponse:
        """Give the place of a session back, for another worker."""
        check_name("session_id", request.session_id)
        returned = await self.tasks.give_back(request.session_id, request.failure[:500], caller.owner)
        return tasks_pb2.ReturnTaskResponse(returned=returned)

    async def _lease(self, request: tasks_pb2.LeaseTasksRequest, caller: Caller) -> list[tasks_pb2.LeasedTask]:
        """Lease places, unless the run is paused. A task is begun only if a group of it may be admitted, so the
        staleness bound holds for tasks as it does for prompts."""
        stat, orders = await asyncio.gather(self.queue.stat(), self.control.orders())
        if orders.is_paused:
            return []
        room = max(0, stat.admission_room)
        return await self.tasks.lease(request.worker, request.max_tasks or 1, room, caller.owner)

    def _checked(self, task: tasks_pb2.NewTask, path: str) -> tuple[tasks_pb2.NewTask, str]:
        """The task with absent fields filled in, and what it asks for: one spelling, no defaults of the config."""
        if task.task_id:
            check_name(f"{path}task_id", task.task_id)
            if len(task.task_id) > MAX_TASK_ID:
                raise InvalidInput(f"{path}task_id", f"must have at most {MAX_TASK_ID} characters")
        if task.data_source:
            check_name(f"{path}data_source", task.data_source)
        if not 0 <= task.num_sessions <= MAX_SESSIONS:
            raise InvalidInput(f"{path}num_sessions", f"must be 0 to {MAX_SESSIONS}")
        longest_s = self.config.gateway.session_ttl_s / 2
        if not 0 <= task.deadline_s <= longest_s:
            raise InvalidInput(f"{path}deadline_s", f"must be 0 to {longest_s:g}, half of gateway.session_ttl_s")
        payload_json, num_sessions = task.payload_json or "null", task.num_sessions or 1
        payload = checks.json_value(payload_json, f"{path}payload_json")
        full = tasks_pb2.NewTask(
            task_id=task.task_id or f"task-{uuid.uuid4().hex[:16]}",
            payload_json=payload_json,
            num_sessions=num_sessions,
            deadline_s=task.deadline_s or longest_s,
            data_source=task.data_source,
        )
        return full, json.dumps([payload, num_sessions, task.deadline_s, task.data_source], sort_keys=True)
