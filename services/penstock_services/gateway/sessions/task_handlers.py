"""Tasks of a run: work that is handed to the workers of harnesses, with leases."""

from __future__ import annotations

import asyncio
import time
import uuid

from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.sessions.task_store import NewTask, Task, TaskLease, TaskStore
from penstock.store.run_control import RunControl
from penstock.v1 import tasks_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, bounded, operation

MAX_SESSIONS = 1024
"""Largest number of sessions of one task."""
MAX_TASK_ID = 112
"""Longest id of a task. Its sessions are called TASK.PLACE.ATTEMPT, and names have at most 128 characters."""
MAX_WAIT_S = 30.0
POLL_S = 0.25


class TaskHandlers:
    def __init__(
        self, config: RunConfig, audit: AuditLog, tasks: TaskStore, queue: RedisReplayQueue, control: RunControl
    ) -> None:
        self.config = config
        self.audit = audit
        self.tasks = tasks
        self.queue = queue
        self.control = control

    @operation("submit")
    async def submit_tasks(self, request: tasks_pb2.SubmitTasksRequest) -> tasks_pb2.SubmitTasksResponse:
        limit = self.config.gateway.max_prompts_per_request
        if not 1 <= len(request.tasks) <= limit:
            raise InvalidInput("tasks", f"must be 1 to {limit} tasks")
        if request.idempotency_key:
            validation.check_name("idempotency_key", request.idempotency_key)
        tasks = [self._checked(task, f"tasks[{number}].") for number, task in enumerate(request.tasks)]
        if len({task.task_id for task in tasks}) < len(tasks):
            raise InvalidInput("tasks", "must have different ids")
        task_ids, replayed = await self.tasks.submit(tasks, request.idempotency_key)
        return tasks_pb2.SubmitTasksResponse(task_ids=task_ids, replayed=replayed)

    @operation("read")
    async def get_task(self, request: tasks_pb2.GetTaskRequest) -> tasks_pb2.Task:
        validation.check_name("task_id", request.task_id)
        return _task_to_proto(await self.tasks.get(request.task_id))

    @operation("submit", keeps_deadline=True)
    async def lease_tasks(self, request: tasks_pb2.LeaseTasksRequest) -> tasks_pb2.LeaseTasksResponse:
        validation.check_name("worker", request.worker)
        if not 0 <= request.max_tasks <= MAX_SESSIONS:
            raise InvalidInput("max_tasks", f"must be 0 to {MAX_SESSIONS}")
        if not 0 <= request.wait_s <= MAX_WAIT_S:
            raise InvalidInput("wait_s", f"must be 0 to {MAX_WAIT_S:g}")
        deadline = time.monotonic() + request.wait_s
        while True:
            leases = await bounded(self._lease(request), 2 * self.config.redis.timeout_s)
            if leases or time.monotonic() + POLL_S > deadline:
                break
            await asyncio.sleep(POLL_S)
        lease_s = self.config.gateway.sessions.task_lease_s
        leased = [
            tasks_pb2.LeasedTask(
                task_id=lease.task_id, session_id=lease.session_id, attempt=lease.attempt, payload_json=lease.payload,
                lease_s=lease_s,
            )
            for lease in leases
        ]  # fmt: skip
        return tasks_pb2.LeaseTasksResponse(tasks=leased)

    @operation("submit")
    async def heartbeat_tasks(self, request: tasks_pb2.HeartbeatTasksRequest) -> tasks_pb2.HeartbeatTasksResponse:
        for number, session_id in enumerate(request.session_ids):
            validation.check_name(f"session_ids[{number}]", session_id)
        lost = await self.tasks.heartbeat(list(request.session_ids))
        return tasks_pb2.HeartbeatTasksResponse(lost_session_ids=lost)

    @operation("submit")
    async def return_task(self, request: tasks_pb2.ReturnTaskRequest) -> tasks_pb2.ReturnTaskResponse:
        validation.check_name("session_id", request.session_id)
        returned = await self.tasks.give_back(request.session_id, request.failure[:500])
        return tasks_pb2.ReturnTaskResponse(returned=returned)

    async def _lease(self, request: tasks_pb2.LeaseTasksRequest) -> list[TaskLease]:
        """Lease places, unless the run is paused. A task is begun only if a group of it may be admitted, so the
        staleness bound holds for tasks as it does for prompts."""
        stat, orders = await asyncio.gather(self.queue.stat(), self.control.orders())
        if orders.is_paused:
            return []
        return await self.tasks.lease(request.worker, request.max_tasks or 1, max(0, stat.admission_room))

    def _checked(self, task: tasks_pb2.NewTask, path: str) -> NewTask:
        if task.task_id:
            validation.check_name(f"{path}task_id", task.task_id)
            if len(task.task_id) > MAX_TASK_ID:
                raise InvalidInput(f"{path}task_id", f"must have at most {MAX_TASK_ID} characters")
        if task.data_source:
            validation.check_name(f"{path}data_source", task.data_source)
        if not 0 <= task.num_sessions <= MAX_SESSIONS:
            raise InvalidInput(f"{path}num_sessions", f"must be 0 to {MAX_SESSIONS}")
        longest_s = self.config.gateway.session_ttl_s / 2
        if not 0 <= task.deadline_s <= longest_s:
            raise InvalidInput(f"{path}deadline_s", f"must be 0 to {longest_s:g}, half of gateway.session_ttl_s")
        validation.check_json(task.payload_json or "null", f"{path}payload_json")
        return NewTask(
            task_id=task.task_id or f"task-{uuid.uuid4().hex[:16]}",
            payload=task.payload_json or "null",
            num_sessions=task.num_sessions or 1,
            deadline_s=task.deadline_s or longest_s,
            data_source=task.data_source,
        )


def _task_to_proto(task: Task) -> tasks_pb2.Task:
    return tasks_pb2.Task(
        task_id=task.task_id,
        state=task.state.upper(),
        num_sessions=task.num_sessions,
        num_rewarded=task.num_rewarded,
        num_failed=task.num_failed,
        payload_json=task.payload,
        data_source=task.data_source,
        session_ids=task.rewarded,
        prompt_ids=task.prompt_ids,
        failure=task.failure,
    )
