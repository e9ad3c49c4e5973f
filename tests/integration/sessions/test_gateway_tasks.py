"""Tasks, groups and routing of sessions through a gateway: REST, gRPC and the Python client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import redis.asyncio as redis
from pydantic_core import from_json

from penstock.client import PenstockClient
from penstock.codec import decode_group
from penstock.errors import InvalidInput
from penstock.replay.queue import RedisReplayQueue
from penstock.sessions.task_store import TaskStore
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.keys import RunKeys
from penstock.v1 import prompts_pb2, tasks_pb2, tasks_pb2_grpc
from support.gateways import RUN, Gateway, run_config, running
from support.redis_server import RedisProcess
from support.scripted_engines import ANSWER, TalkingEngine


class Agent:
    """A harness with a memory. It sends its whole history back as text."""

    def __init__(self, client: openai.AsyncOpenAI, session_id: str) -> None:
        self.client = client
        self.headers = {"X-Penstock-Session": session_id}
        self.history: list[Any] = []

    async def ask(self, question: str) -> None:
        self.history.append({"role": "user", "content": question})
        answer = await self.client.chat.completions.create(
            model="test", messages=self.history, extra_headers=self.headers
        )
        self.history.append({"role": "assistant", "content": answer.choices[0].message.content})


def clients(gateway: Gateway) -> tuple[PenstockClient, openai.AsyncOpenAI]:
    asked = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0)
    return PenstockClient(gateway.url, api_key=gateway.key), asked


async def test_a_session_that_was_given_back_has_no_reward(talking: tuple[Gateway, dict[str, TalkingEngine]]) -> None:
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        [task_id] = await client.submit_tasks([1])
        [leased] = await client.lease_tasks("w", 1)
        agent = Agent(asked, leased.session_id)
        await agent.ask("abc")
        assert await client.return_task(leased.session_id, "the repository is gone")
        session = await client.get_session(leased.session_id)
        assert (session.state, session.reward, session.prompt_ids) == ("FINISHED", None, ())
        task = await client.get_task(task_id)
        assert (task.state, task.failure) == ("OPEN", "the repository is gone"), (
            "it is said before the task is given up"
        )
        with pytest.raises(openai.ConflictError, match="has lost its place in its task"):
            await agent.ask("abc")


async def test_every_task_that_is_accepted_can_be_worked_on(
    talking: tuple[Gateway, dict[str, TalkingEngine]],
) -> None:
    """The names of its sessions are longer than its own."""
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        with pytest.raises(InvalidInput, match="at most 112 characters"):
            await client.submit_tasks([1], task_ids=["t" * 113])
        [task_id] = await client.submit_tasks([1], task_ids=["t" * 112])
        [leased] = await client.lease_tasks("w", 1)
        await Agent(asked, leased.session_id).ask("abc")
        await client.reward_session(leased.session_id, 1.0)
        assert (await client.get_task(task_id)).state == "FINISHED"


async def test_a_repeated_task_is_the_same_however_it_is_written_and_whatever_the_defaults(
    redis_process: RedisProcess, redis_client: redis.Redis, tmp_path: Path
) -> None:
    for ttl_s, payload in ((600, '{"a": 1, "b": [2.5]}'), (1200, '{"b":[2.5],"a":1}')):
        async with running(run_config(redis_process.url, tmp_path, session_ttl_s=ttl_s)) as gateway:
            sent = tasks_pb2.SubmitTasksRequest(tasks=[tasks_pb2.NewTask(task_id="t", payload_json=payload)])
            answer = await tasks_pb2_grpc.TaskServiceStub(gateway.channel).SubmitTasks(sent)
            assert list(answer.task_ids) == ["t"]
            same: dict[str, Any] = {"task_id": "t", "payload": {"b": [2.5], "a": 1}}
            others = ({"deadline_s": 60}, {"num_sessions": 2}, {"payload": {"a": 1}}, {"data_source": "d"})
            for body, status in ((same, 200), *((same | other, 409) for other in others)):
                assert (await gateway.rest.post("/v1/tasks", json={"tasks": [body]})).status_code == status


async def test_a_task_becomes_one_group_of_its_sessions(
    talking: tuple[Gateway, dict[str, TalkingEngine]], queue: RedisReplayQueue
) -> None:
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        [task_id] = await client.submit_tasks([{"issue": 17}], 2, data_source="bugs", idempotency_key="one")
        assert await client.submit_tasks([{"issue": 17}], 2, data_source="bugs", idempotency_key="one") == [task_id]
        leased = await client.lease_tasks("w", 9)
        assert [task.payload for task in leased] == [{"issue": 17}] * 2
        assert await client.lease_tasks("w", 9) == []
        assert await client.heartbeat_tasks([task.session_id for task in leased]) == []
        answers = []
        for number, task in enumerate(leased):
            agent = Agent(asked, task.session_id)
            for question in ("abc", "abab", "ok")[: number + 2]:
                await agent.ask(question)
            answers.append(await client.reward_session(task.session_id, float(number)))
        assert [answer.is_waiting for answer in answers] == [True, False]
        [prompt_id] = answers[1].prompt_ids
        found = await client.get_task(task_id)
        assert (found.state, found.prompt_ids, found.num_rewarded) == ("FINISHED", (prompt_id,), 2)
        again = await client.reward_session(leased[0].session_id, 5.0)
        assert (again.prompt_ids, again.replayed) == ((prompt_id,), True)
        assert not await client.return_task(leased[0].session_id)
    group = decode_group(await queue.get_group(prompt_id))
    assert group.data_source == "bugs"
    assert [(path.reward, int(path.loss_mask.sum())) for path in group.trajectories] == [
        (0.0, 2 * len(ANSWER)), (1.0, 3 * len(ANSWER))
    ]  # fmt: skip
    stat = await queue.stat()
    assert (stat.queued, stat.conservation_error) == (1, 0)


async def test_a_gateway_finishes_what_another_has_begun(
    talking: tuple[Gateway, dict[str, TalkingEngine]], queue: RedisReplayQueue
) -> None:
    """The session has its reward, and the gateway that was to make the group has died."""
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        await Agent(asked, "s").ask("abc")
        keys = RunKeys("test")
        await queue.client.hset(keys.session("s", "state"), "reward", '{"reward": 0.5, "parts": {}}')
        await queue.client.zadd(keys.finishing, {"session:s": 1})
        async with asyncio.timeout(100):
            while (await queue.stat()).queued == 0:
                await asyncio.sleep(0.05)
        answer = await client.reward_session("s", 1.0)
        assert answer.replayed and len(answer.prompt_ids) == 1
    assert (await queue.stat()).queued == 1


async def test_tasks_over_grpc_and_wrong_ones(talking: tuple[Gateway, dict[str, TalkingEngine]]) -> None:
    gateway, _ = talking
    tasks: Any = tasks_pb2_grpc.TaskServiceStub(gateway.channel)
    submitted = await tasks.SubmitTasks(tasks_pb2.SubmitTasksRequest(tasks=[tasks_pb2.NewTask(payload_json="[1]")]))
    [task_id] = submitted.task_ids
    leased = await tasks.LeaseTasks(tasks_pb2.LeaseTasksRequest(worker="w", wait_s=1))
    assert leased.tasks[0].task_id == task_id and leased.tasks[0].payload_json == "[1]"
    session_id = leased.tasks[0].session_id
    lost = await tasks.HeartbeatTasks(tasks_pb2.HeartbeatTasksRequest(session_ids=[session_id, "x"]))
    assert list(lost.lost_session_ids) == ["x"]
    assert (await tasks.ReturnTask(tasks_pb2.ReturnTaskRequest(session_id=session_id))).returned
    task = await tasks.GetTask(tasks_pb2.GetTaskRequest(task_id=task_id))
    assert (task.state, task.num_sessions) == (tasks_pb2.Task.OPEN, 1)
    await gateway.rest.post(f"{RUN}:pause")
    assert not (await tasks.LeaseTasks(tasks_pb2.LeaseTasksRequest(worker="w"))).tasks, "the run is paused"
    client, _ = clients(gateway)
    async with client:
        with pytest.raises(InvalidInput, match="deadline_s"):
            await client.submit_tasks([1], deadline_s=1e9)
        with pytest.raises(InvalidInput, match="num_sessions"):
            await client.submit_tasks([1], num_sessions=0)


async def test_a_session_stays_with_the_server_that_has_its_prefix(
    talking: tuple[Gateway, dict[str, TalkingEngine]], redis_client: redis.Redis
) -> None:
    gateway, engines = talking
    _, asked = clients(gateway)
    agents = [Agent(asked, f"s{number}") for number in range(8)]
    async with asked:
        for question in ("abc", "ok", "abab", "c"):
            await asyncio.gather(*(agent.ask(question) for agent in agents))
        assert all(engine.requests for engine in engines.values())
        text = (await gateway.rest.get("/metrics")).text
        rate = number_of(text, "cached_tokens_total") / number_of(text, "history_tokens_total")
        assert rate >= 0.8, text
        assert number_of(text, 'calls_total{kind="continued"}') == 24
        fleet = Fleet(redis_client, "test")
        agent = agents[0]
        home = await answered_by(agent, engines)
        assert await answered_by(agent, engines) == home
        assert (await gateway.rest.post(f"{RUN}/servers/{home}:drain")).status_code == 200
        assert await answered_by(agent, engines) != home, "it is drained"
        await gateway.rest.post(f"{RUN}/servers/{home}:undrain")
        moved = await answered_by(agent, engines)
        record = next(server for server in await fleet.servers() if server.server_id == moved)
        old = ServerRecord(moved, record.address, "talking", policy_version=-5)
        await fleet.report(old)
        assert await answered_by(agent, engines) != moved, "its version is no longer admitted"


async def answered_by(agent: Agent, engines: dict[str, TalkingEngine]) -> str:
    before = {server_id: len(engine.requests) for server_id, engine in engines.items()}
    await agent.ask("a")
    [server_id] = [name for name, engine in engines.items() if len(engine.requests) > before[name]]
    return server_id


def number_of(text: str, name: str) -> float:
    line = next(line for line in text.splitlines() if line.startswith(f"penstock_gateway_session_{name}"))
    return float(line.rpartition(" ")[2])


async def test_rewards_that_come_at_once_make_one_group(
    talking: tuple[Gateway, dict[str, TalkingEngine]], queue: RedisReplayQueue
) -> None:
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        for number in range(5):
            name = f"s{number}"
            await Agent(asked, name).ask("abc")
            answers = await asyncio.gather(*(client.reward_session(name, float(value)) for value in range(8)))
            assert len({answer.prompt_ids for answer in answers}) == 1 and len(answers[0].prompt_ids) == 1
            assert (await client.reward_session(name, 9.0)).prompt_ids == answers[0].prompt_ids
    stat = await queue.stat()
    assert (stat.queued, stat.conservation_error) == (5, 0)


async def test_a_name_is_used_again_after_its_session_was_forgotten(
    talking: tuple[Gateway, dict[str, TalkingEngine]], queue: RedisReplayQueue
) -> None:
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        found = []
        for _ in range(2):
            await Agent(asked, "s").ask("abc")
            found.append((await client.reward_session("s", 1.0)).prompt_ids)
            await queue.client.delete(RunKeys("test").session("s", "state"))  # Its time has passed.
    assert len(set(found)) == 2 and (await queue.stat()).queued == 2


async def test_white_space_of_a_question_is_part_of_it(
    talking: tuple[Gateway, dict[str, TalkingEngine]],
) -> None:
    """In what the model said it is not: harnesses strip it."""
    gateway, _ = talking
    client, asked = clients(gateway)
    async with client, asked:
        agent = Agent(asked, "s")
        await agent.ask("if a:\n    b")
        agent.history[1]["content"] = " abc   ok "
        await agent.ask("ok")
        assert [call.parent for call in (await client.get_session("s")).calls] == [None, 0]
        agent.history[0]["content"] = "if a:\n  b"
        await agent.ask("ok")
        session = await client.get_session("s")
        assert [call.parent for call in session.calls] == [None, 0, None]
        assert "if a:\n  b" in "".join(session.calls[2].inserted_tokens), "the model sees what was edited"


POISON = (
    '"\\ud83d"',
    '{"\\udc00": 1}',
    "NaN",
    "[1e999]",
    "-1e400",
    "1" * 5000,
    "[" * 500 + "]" * 500,
    "1" * 280 + "e50",
)


@pytest.mark.parametrize("payload", POISON, ids=lambda payload: payload[:12])
async def test_a_payload_that_cannot_be_sent_to_a_worker_is_refused(
    talking: tuple[Gateway, dict[str, TalkingEngine]], payload: str
) -> None:
    gateway, _ = talking
    stub: Any = tasks_pb2_grpc.TaskServiceStub(gateway.channel)
    with pytest.raises(grpc.aio.AioRpcError, match="payload_json"):
        await stub.SubmitTasks(tasks_pb2.SubmitTasksRequest(tasks=[tasks_pb2.NewTask(payload_json=payload)]))
    body = f'{{"tasks": [{{"payload": {payload}}}]}}'
    headers = {"Content-Type": "application/json"}
    response = await gateway.rest.post("/v1/tasks", content=body, headers=headers)
    assert (response.status_code, response.json()["reason"]) == (400, "INVALID_INPUT"), response.text
    client, asked = clients(gateway)
    async with client, asked:
        await client.submit_tasks(["innocent \U0001f600 \\ud83d", 1e308])
        assert [task.payload for task in await client.lease_tasks("w", 4)] == ["innocent \U0001f600 \\ud83d", 1e308]


async def test_poison_that_an_older_gateway_has_stored_stops_neither_a_worker_nor_a_page(
    talking: tuple[Gateway, dict[str, TalkingEngine]], queue: RedisReplayQueue
) -> None:
    gateway, _ = talking
    tasks = TaskStore(queue.client, queue.run, 60, gateway.config.gateway.sessions)
    poison = ('{"text": "\\ud83d"}', "[NaN, 1e999]", '"innocent \U0001f600"')
    await tasks.submit(
        [tasks_pb2.NewTask(task_id=f"t{n}", payload_json=text, num_sessions=1) for n, text in enumerate(poison)]
    )
    prompts = [prompts_pb2.Prompt(ground_truth_json=text, extra_info_json="{}", num_samples=1) for text in poison]
    await queue.submit([prompt.SerializeToString() for prompt in prompts], [0] * 3, "")
    leased = await gateway.rest.post("/v1/tasks:lease", json={"worker": "w", "max_tasks": 3})
    page = await gateway.rest.get(f"{RUN}/prompts")
    shown = [{"text": "?"}, [None, None], "innocent \U0001f600"]
    assert [task["payload"] for task in from_json(leased.content)["tasks"]] == shown
    assert [found["prompt"]["ground_truth"] for found in from_json(page.content)["prompts"]] == shown
