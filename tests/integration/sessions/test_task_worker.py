"""Workers that try tasks with an agent, through a real gateway."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from penstock.cancellation import end_task
from penstock.client import Attempt, PenstockClient, work
from penstock.client import worker as worker_module
from penstock.codec import decode_group
from penstock.errors import Unauthenticated, Unavailable
from penstock.replay.queue import RedisReplayQueue
from support.gateways import Gateway
from support.scripted_engines import ANSWER

Talking = tuple[Gateway, dict[str, Any]]


@pytest.fixture
async def client(talking: Talking, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PenstockClient]:
    monkeypatch.setattr(worker_module, "PAUSE_S", 0.05)
    async with PenstockClient(talking[0].url, api_key=talking[0].key) as client:
        yield client


async def ask(attempt: Attempt, question: str = "abc") -> None:
    async with openai.AsyncOpenAI(
        base_url=attempt.base_url, api_key=attempt.api_key, default_headers=attempt.headers, max_retries=0
    ) as model:
        await model.chat.completions.create(model=attempt.model, messages=[{"role": "user", "content": question}])


def ask_and_wait(attempt: Attempt) -> float:
    """An agent without asyncio, of another kind of client."""
    import anthropic  # takes seconds

    with anthropic.Anthropic(
        base_url=attempt.url, api_key=attempt.api_key, default_headers=attempt.headers, max_retries=0
    ) as model:
        model.messages.create(model=attempt.model, max_tokens=9, messages=[{"role": "user", "content": "abc"}])
    return 0.25


async def test_what_agents_sampled_is_trained_with_their_rewards(
    client: PenstockClient, queue: RedisReplayQueue
) -> None:
    at_work = most = 0

    async def agent(attempt: Attempt) -> dict[str, float]:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await ask(attempt)
        at_work -= 1
        return {"reward": attempt.payload["score"], "lines": 7}

    task_ids = await client.submit_tasks([{"score": 0.5}, {"score": -1}], 2)
    done = await work(client, agent, at_once=3, idle_s=0.2)
    assert (done.rewarded, done.failed, done.lost, done.returned) == (4, 0, 0, 0)
    assert most <= 3
    tasks = [await client.get_task(task_id) for task_id in task_ids]
    assert [task.num_rewarded for task in tasks] == [2, 2]
    groups = [decode_group(await queue.get_group(prompt_id)) for task in tasks for prompt_id in task.prompt_ids]
    assert sorted(t.reward for group in groups for t in group.trajectories) == [-1, -1, 0.5, 0.5]
    assert all(t.reward_parts == {"lines": 7} for group in groups for t in group.trajectories)
    assert all(tuple(t.token_ids[-len(ANSWER) :]) == ANSWER for group in groups for t in group.trajectories)


async def test_an_agent_may_be_a_function_that_waits(client: PenstockClient) -> None:
    await client.submit_tasks([{}], 1)
    assert (await work(client, ask_and_wait, idle_s=0.2)).rewarded == 1


async def test_as_many_functions_run_at_once_as_are_wanted(client: PenstockClient) -> None:
    num_agents = 40  # asyncio's own pool has at most 32 threads
    together = threading.Barrier(num_agents, timeout=60)

    def agent(attempt: Attempt) -> float:
        together.wait()
        return ask_and_wait(attempt)

    await client.submit_tasks([{}], num_agents)
    done = await work(client, agent, at_once=num_agents, idle_s=0.2)
    assert (done.rewarded, done.failed) == (num_agents, 0)


async def test_the_first_lease_is_renewed_in_time_however_short_it_is(
    client: PenstockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, renewed, beat = client.lease_tasks, asyncio.Event(), client.heartbeat_tasks

    async def lease_tasks(*arguments: Any) -> Any:
        return [task.model_copy(update={"lease_s": 0.3}) for task in await lease(*arguments)]

    async def heartbeat_tasks(*arguments: Any) -> Any:
        renewed.set()
        return await beat(*arguments)

    async def agent(attempt: Attempt) -> float:
        await ask(attempt)
        async with asyncio.timeout(60):
            await renewed.wait()
        return 1.0

    monkeypatch.setattr(worker_module, "ASK_S", 3600.0)  # how often leases are renewed before one is known
    monkeypatch.setattr(client, "lease_tasks", lease_tasks)
    monkeypatch.setattr(client, "heartbeat_tasks", heartbeat_tasks)
    await client.submit_tasks([1], 1)
    assert (await work(client, agent, idle_s=0.2)).rewarded == 1


async def test_an_agent_that_fails_costs_its_task_a_failure_and_the_worker_goes_on(client: PenstockClient) -> None:
    async def agent(attempt: Attempt) -> float:
        if attempt.payload == "bad":
            raise KeyError("no such file")
        await ask(attempt)
        return 1.0

    bad, good = await client.submit_tasks(["bad", "good"], 1)
    done = await work(client, agent, idle_s=0.2)
    assert done.rewarded == 1 and done.failed >= 1
    failed = await client.get_task(bad)
    assert failed.state == "FAILED" and "KeyError: 'no such file'" in failed.failure
    assert (await client.get_task(good)).num_rewarded == 1


async def test_parts_without_a_reward_are_a_failure(client: PenstockClient) -> None:
    async def agent(attempt: Attempt) -> dict[str, float]:
        return {"lines": 7}

    [task_id] = await client.submit_tasks([1], 1)
    assert (await work(client, agent, idle_s=0.2)).rewarded == 0
    assert "must return `reward` too; it returned lines" in (await client.get_task(task_id)).failure


@pytest.mark.parametrize(
    ("reward", "reason"),
    [(1.0, "has no calls"), (1e300, "must be a number"), (float("nan"), "must be a finite number")],
)
async def test_a_reward_that_is_refused_is_a_failure(client: PenstockClient, reward: float, reason: str) -> None:
    """Nobody waits for the end of the lease."""

    async def agent(attempt: Attempt) -> float:
        return reward

    [task_id] = await client.submit_tasks([1], 1)
    done = await work(client, agent, idle_s=0.2)
    assert done.rewarded == 0 and done.failed >= 1
    failed = await client.get_task(task_id)
    assert failed.state == "FAILED" and reason in failed.failure


async def test_a_reward_is_sent_again_while_the_gateway_is_away(
    client: PenstockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tries, send = 0, client.reward_session

    async def reward_session(*arguments: Any) -> Any:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 4:
            raise Unavailable("the gateway does not answer")
        return await send(*arguments)

    async def agent(attempt: Attempt) -> float:
        await ask(attempt)
        return 1.0

    monkeypatch.setattr(client, "reward_session", reward_session)
    [task_id] = await client.submit_tasks([1], 1)
    assert (await work(client, agent, idle_s=0.2)).rewarded == 1
    assert num_tries == 4 and (await client.get_task(task_id)).num_rewarded == 1


async def test_a_worker_that_is_stopped_returns_its_places(client: PenstockClient) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def agent(attempt: Attempt) -> float:
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return 1.0

    [task_id] = await client.submit_tasks([1], 1)
    working = asyncio.create_task(work(client, agent, name="first"))
    async with asyncio.timeout(60):
        await started.wait()
    await end_task(working)
    assert working.cancelled() and ended.is_set()
    [leased] = await client.lease_tasks("second")
    assert (leased.task_id, leased.attempt) == (task_id, 2), "nobody waits for the end of the lease"
    assert (await client.get_task(task_id)).num_failed == 0


async def test_an_agent_whose_lease_is_lost_is_stopped(client: PenstockClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "ASK_S", 0.2)
    started, stopped = asyncio.Event(), asyncio.Event()
    sessions: list[str] = []

    async def agent(attempt: Attempt) -> float:
        sessions.append(attempt.task.session_id)
        if len(sessions) > 1:
            return 1.0
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            stopped.set()
        return 1.0

    await client.submit_tasks([1], 1)
    working = asyncio.create_task(work(client, agent, at_once=1, idle_s=1))
    try:
        async with asyncio.timeout(60):
            await started.wait()
            await client.return_task(sessions[0])
            await stopped.wait()
            done = await working
    finally:
        await end_task(working)
    assert (done.lost, done.returned) == (1, 0)


async def test_a_wrong_key_is_raised(talking: Talking) -> None:
    async with PenstockClient(talking[0].url, api_key="wrong") as stranger:
        with pytest.raises(Unauthenticated):
            await work(stranger, ask_and_wait)
