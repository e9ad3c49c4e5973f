"""Rows of the fault matrix: sessions and tasks that their clients leave behind."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio as redis

from penstock.client import Attempt, PenstockClient, work
from penstock.codec import decode_group
from penstock.config.run import WeightsConfig
from penstock.config.service import SessionLimits
from penstock.replay.queue import RedisReplayQueue
from penstock.sessions.session_store import SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.keys import RunKeys
from penstock.v1 import tasks_pb2
from support.fleet_runs import Part
from support.gateways import run_config, running
from support.redis_server import RedisProcess, num_commands
from support.scripted_engines import TalkingEngine, make_tokenizer_folder, serving

AREA = "sessions and tasks"
NUM_SESSIONS = 10_000
TTL_S = 3
NUM_TASKS, SESSIONS_PER_TASK, NUM_LEASED = 6, 2, 5


async def until(found: Callable[[], Any], timeout_s: float = 120) -> None:
    async with asyncio.timeout(timeout_s):
        while not await found():
            await asyncio.sleep(0.05)


@pytest.mark.fault_row(
    AREA, "a worker is killed with leases", how="SIGKILL to a worker whose agents have made their first calls",
    must="its places are leased again, and every place is rewarded once",
)  # fmt: skip
@pytest.mark.chaos
async def test_a_worker_is_killed_with_leases(
    redis_process: RedisProcess, redis_client: redis.Redis, tmp_path: Path, record_property: Any
) -> None:
    make_tokenizer_folder(tmp_path)
    (tmp_path / "cluster-key").write_text("secret")
    limits = SessionLimits(task_lease_s=3)
    config = run_config(redis_process.url, tmp_path, sessions=limits).model_copy(
        update={"weights": WeightsConfig(cluster_key_file=tmp_path / "cluster-key")}
    )
    engine, tried = TalkingEngine(), list[str]()

    async def agent(attempt: Attempt) -> float:
        tried.append(attempt.task.session_id)
        async with openai.AsyncOpenAI(
            base_url=attempt.base_url, api_key=attempt.api_key, default_headers=attempt.headers, max_retries=0
        ) as model:
            await model.chat.completions.create(model=attempt.model, messages=[{"role": "user", "content": "abc"}])
        return 1.0

    async with (
        serving(config, redis_client, tmp_path, {"r0": engine}, heartbeats=True),
        running(config) as gateway,
        PenstockClient(gateway.url, api_key=gateway.key) as client,
    ):
        task_ids = await client.submit_tasks([{}] * NUM_TASKS, SESSIONS_PER_TASK)
        command = [sys.executable, "-m", "support.faults.hanging_worker", gateway.url, gateway.key, str(NUM_LEASED)]
        worker = Part("worker", command, tmp_path / "worker.log")
        tasks = TaskStore(redis_client, config.run, 3600, limits)
        try:

            async def has_called() -> bool:
                return (await tasks.stat()).leased == len(engine.requests) == NUM_LEASED

            await until(has_called)
            worker.kill()
        finally:
            worker.end()
        killed_s = time.monotonic()
        done = await work(client, agent, at_once=3, idle_s=2 * limits.task_lease_s)
        recovery_s = time.monotonic() - killed_s - 2 * limits.task_lease_s
        stat = await tasks.stat()
        found = [await client.get_task(task_id) for task_id in task_ids]
    num_places = NUM_TASKS * SESSIONS_PER_TASK
    assert (done.rewarded, done.failed, done.lost) == (num_places, 0, 0)
    assert len({session.rpartition(".")[0] for session in tried}) == len(tried) == num_places, "each place once"
    assert len(engine.requests) == num_places + NUM_LEASED
    assert (stat.reclaimed, stat.rewarded, stat.conservation_error) == (NUM_LEASED, num_places, 0)
    queue = RedisReplayQueue(redis_client, config.run, config.replay)
    groups = [decode_group(await queue.get_group(prompt_id)) for task in found for prompt_id in task.prompt_ids]
    assert [len(group.trajectories) for group in groups] == [SESSIONS_PER_TASK] * NUM_TASKS
    few, many = await commands_per_place(redis_client, 16), await commands_per_place(redis_client, 512)
    print(f"commands of a sweep for each place that it returns: {few:.1f}; of a large task: {many:.1f}")
    assert many < 2 * few, "a sweep must not stall the queue, however large the worker's tasks are"
    record_property("fault", {"lost": 0, "doubled": 0, "recovery_s": recovery_s})


async def commands_per_place(client: redis.Redis, num_sessions: int) -> float:
    """How many commands a sweep costs for each place that a dead worker has left of a task with so many sessions."""
    tasks = TaskStore(client, f"of-{num_sessions}", 3600, SessionLimits(task_lease_s=0.001))
    await tasks.submit([tasks_pb2.NewTask(task_id="t", payload_json="1", num_sessions=num_sessions)])
    assert len(await tasks.lease("dead", num_sessions, 1)) == num_sessions
    async with asyncio.timeout(20):
        while True:
            before = await num_commands(client)
            num_reclaimed, _ = await tasks.sweep()
            if num_reclaimed:
                return (await num_commands(client) - before) / num_reclaimed


@pytest.mark.fault_row(
    AREA, "10,000 sessions are left to expire", how="each makes one call, and none gets a reward",
    must="all are forgotten, a few hundred in each sweep; their memory returns; the queue goes on meanwhile",
)  # fmt: skip
@pytest.mark.chaos
async def test_ten_thousand_sessions_are_left_to_expire(redis_client: redis.Redis, record_property: Any) -> None:
    limits, keys = SessionLimits(), RunKeys("test")
    sessions, tasks = (kind(redis_client, "test", 3600, limits) for kind in (SessionStore, TaskStore))
    empty = int((await redis_client.info("memory"))["used_memory"])
    names = [f"left-{number}" for number in range(NUM_SESSIONS)]

    async def record(some: list[str]) -> None:
        for name in some:
            await sessions.record(name, bytes(2000), "call")

    await asyncio.gather(*(record(names[first::20]) for first in range(20)))
    used = int((await redis_client.info("memory"))["used_memory"]) - empty
    left = (await tasks.stat()).sessions
    assert left == NUM_SESSIONS
    # Their hour is over in TTL_S seconds, however long the recording has taken.
    ending, end_s = redis_client.pipeline(transaction=False), time.monotonic() + TTL_S
    for name in names:
        for part in ("calls", "state"):
            ending.expire(keys.session(name, part), TTL_S)
    ending.zadd(keys.sessions, dict.fromkeys(names, await sessions.now_ms() + 1000 * TTL_S))
    await ending.execute()

    queue, longest_s = RedisReplayQueue(redis_client, "test", run_config("", Path()).replay), 0.0
    most_at_once = 0
    async with asyncio.timeout(120):
        while left:
            call_started = time.monotonic()
            await queue.submit([b"prompt"], [0], "")
            await queue.lease("server", 1)
            longest_s = max(longest_s, time.monotonic() - call_started)
            before, _ = left, await tasks.sweep()
            left = (await tasks.stat()).sessions
            most_at_once = max(most_at_once, before - left)
            await asyncio.sleep(0.05)
    print(f"longest submit and lease: {1000 * longest_s:.1f} ms; forgotten in one sweep: up to {most_at_once}")
    assert most_at_once <= 500, "a sweep must not stall the queue, however many have expired"
    assert (await tasks.stat()).session_bytes == 0

    async def is_returned() -> bool:
        """Redis deletes expired keys little by little."""
        now = int((await redis_client.info("memory"))["used_memory"]) - empty
        return now < used / 10 and not await redis_client.keys("*session:left-*")

    await until(is_returned)
    stat = await queue.stat()
    assert stat.conservation_error == 0 and stat.in_flight + stat.pending_prompts > 0
    record_property("fault", {"recovery_s": time.monotonic() - end_s})
