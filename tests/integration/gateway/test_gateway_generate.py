"""Generation through the gateway: the official OpenAI client, sessions, pins, over a rollout server's own service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import openai
import pytest
import redis.asyncio as redis

from gateways import RUN, Gateway, publish, run_config, running
from penstock.client import retries
from penstock.codec import decode_group
from penstock.config.weights import WeightsConfig
from penstock.errors import PromptTooLong
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.keys import RunKeys
from penstock.store.policies import PolicyRegistry
from penstock.v1 import generate_pb2, generate_pb2_grpc, prompts_pb2
from penstock.weights.cluster_key import ClusterKey
from penstock_rollout.fleet.internal_listener import make_listener
from penstock_rollout.generate_service import GenerateService
from penstock_rollout.text.tokenization import Tokenization
from scripted_engine import END, LOG_PROB, ScriptedEngine, make_tokenizer_folder, spelled

KEY = "cluster secret"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([(*spelled("four"), END), (*spelled("five!"), END)], versions=(3, 4))


@pytest.fixture
async def gateway(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path, engine: ScriptedEngine
) -> AsyncIterator[Gateway]:
    """A gateway whose fleet is one server with the scripted engine, behind a cluster key."""
    make_tokenizer_folder(tmp_path)
    (tmp_path / "cluster-key").write_text(KEY)
    weights = WeightsConfig(cluster_key_file=tmp_path / "cluster-key")
    config = run_config(redis_process.url, tmp_path).model_copy(update={"weights": weights})
    server = make_listener(ClusterKey.of(config))
    service = GenerateService("test", "r0", engine, Tokenization(tmp_path), 256)  # type: ignore[arg-type]
    generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fleet = Fleet(redis_client, "test")
    await fleet.join(ServerRecord("r0", f"127.0.0.1:{port}", "scripted", policy_version=3))
    await fleet.set_state("r0", "READY")
    async with running(config) as started:
        yield started
    await server.stop(None)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as made:
        yield made


QUESTION: Any = [{"role": "user", "content": "2+2?"}]


async def test_the_openai_client_gets_answers_and_the_policy_version(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="test", messages=QUESTION, logprobs=True, temperature=0.5)
    [choice] = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("four", "stop")
    assert (answer.model_extra or {})["policy_version"] == 3
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [LOG_PROB] * 5
    assert "".join(entry.token for entry in choice.logprobs.content[:4]) == "four"
    completed = await client.completions.create(model="test", prompt="count: ", max_tokens=3)
    assert (completed.choices[0].text, completed.choices[0].finish_reason) == ("fiv", "length")


async def test_answers_are_streamed_and_end_at_a_stop_text(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="test", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert len(texts) == 2 and "".join(text or "" for text in texts) == "four"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 5
    stopped = await client.completions.create(model="test", prompt="count: ", stop=["e!", "never"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("fiv", "stop")


async def test_models_are_the_run_and_its_versions(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["test", "test@3"]
    answer = await client.chat.completions.create(model="test@3", messages=QUESTION)
    assert answer.choices[0].message.content == "four"
    with pytest.raises(openai.ConflictError) as conflict:
        await client.chat.completions.create(model="test@9", messages=QUESTION)
    assert "no server serves version 9, only [3]" in detail(conflict.value)
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="gpt", messages=QUESTION)
    assert "must be test or test@VERSION" in detail(wrong.value)


def detail(error: openai.APIStatusError) -> str:
    body: Any = error.body
    return str(body["detail"])


async def test_what_is_not_offered_is_refused(client: openai.AsyncOpenAI) -> None:
    for wrong in (
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"n": 0}, {"temperature": -1}, {"top_p": 0},
        {"response_format": {"type": "json_object"}}, {"stop": [""]}, {"max_tokens": 0},
    ):  # fmt: skip
        arguments: dict[str, Any] = wrong
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="test", messages=QUESTION, **arguments)


async def test_a_prompt_that_is_too_long_has_its_own_reason_in_both_protocols(gateway: Gateway) -> None:
    """The rollout server refuses it. Its reason and field reach the client."""
    detail = "prompt: has 300 tokens, more than 255"
    response = await gateway.rest.post("/v1/completions", json={"model": "test", "prompt": [5] * 300})
    problem = response.json()
    assert (response.status_code, problem["reason"], problem["field"]) == (400, "PROMPT_TOO_LONG", "prompt")
    assert problem["detail"] == detail
    failure = retries.response_failure(response)
    assert type(failure.error) is PromptTooLong and failure.error.field == "prompt"

    generate: Any = generate_pb2_grpc.GenerateServiceStub(gateway.channel)
    request = generate_pb2.GenerateRequest(
        token_ids=np.full(300, 5, dtype="<i4").tobytes(),
        sampling=prompts_pb2.Sampling(temperature=1, top_p=1, max_tokens=9),
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [chunk async for chunk in generate.Generate(request)]
    trailing = dict(caught.value.trailing_metadata() or ())
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (trailing["reason"], trailing["field"]) == ("PROMPT_TOO_LONG", "prompt")
    assert caught.value.details() == detail


async def test_a_session_becomes_training_data(
    gateway: Gateway, client: openai.AsyncOpenAI, queue: RedisReplayQueue, engine: ScriptedEngine
) -> None:
    session = {"X-Penstock-Session": "talk-1"}
    first = await client.chat.completions.create(model="test", messages=QUESTION, extra_headers=session)
    turns = [*QUESTION, {"role": "assistant", "content": "four"}, {"role": "user", "content": "and 1?"}]
    engine.script = [engine.script[0], engine.script[1]]
    second = await client.chat.completions.create(model="test", messages=turns, extra_headers=session)
    assert (first.choices[0].message.content, second.choices[0].message.content) == ("four", "five!")

    path = "/v1/sessions/talk-1/reward"
    sessions = generate_pb2_grpc.SessionServiceStub(gateway.channel)
    for value in (1e300, -1e300, 1e39):
        refused = await gateway.rest.post(path, json={"reward": value})
        assert refused.status_code == 400 and refused.json()["field"] == "reward", refused.text
        with pytest.raises(grpc.aio.AioRpcError) as bad:
            await sessions.RewardSession(generate_pb2.RewardSessionRequest(session_id="talk-1", reward=value))
        assert bad.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    answer = (await gateway.rest.post(path, json={"reward": 0.75, "reward_parts": {"polite": 1.0}})).json()
    assert len(answer["prompt_ids"]) == 1 and not answer["replayed"]
    again = await sessions.RewardSession(generate_pb2.RewardSessionRequest(session_id="talk-1", reward=0.75))
    assert (list(again.prompt_ids), again.replayed) == (answer["prompt_ids"], True)

    group = decode_group(await queue.get_group(answer["prompt_ids"][0]))
    [trajectory] = group.trajectories
    assert (trajectory.reward, trajectory.reward_parts, group.server_id) == (0.75, {"polite": 1.0}, "session")
    assert tuple(group.prompt_token_ids) == engine.requests[0].prompt_token_ids
    sampled = trajectory.token_ids[trajectory.loss_mask == 1].tolist()
    assert sampled == [*engine.script[0], *engine.script[1]]
    everything = (*group.prompt_token_ids, *trajectory.token_ids)
    assert everything == (*engine.requests[1].prompt_token_ids, *engine.script[1])
    versions = trajectory.token_versions()
    assert set(versions[:5]) == {3} and set(versions[-6:]) == {4}
    assert (await queue.stat()).conservation_error == 0

    with pytest.raises(openai.ConflictError) as over:
        await client.chat.completions.create(model="test", messages=QUESTION, extra_headers=session)
    assert "already has its reward" in detail(over.value)
    missing = await gateway.rest.post("/v1/sessions/none/reward", json={"reward": 1})
    assert missing.status_code == 404


@pytest.mark.parametrize("second_temperature", [0.6, 0.25])
async def test_a_session_is_recorded_with_the_sampling_of_its_calls(
    gateway: Gateway, client: openai.AsyncOpenAI, queue: RedisReplayQueue, second_temperature: float
) -> None:
    session = {"X-Penstock-Session": f"warm-{second_temperature}"}
    turns: Any = [*QUESTION, {"role": "assistant", "content": "four"}, {"role": "user", "content": "and 1?"}]
    for messages, temperature in ((QUESTION, 0.6), (turns, second_temperature)):
        await client.chat.completions.create(
            model="test", messages=messages, temperature=temperature, top_p=0.9, extra_headers=session
        )
    path = f"/v1/sessions/warm-{second_temperature}/reward"
    [prompt_id] = (await gateway.rest.post(path, json={"reward": 1})).json()["prompt_ids"]
    group = decode_group(await queue.get_group(prompt_id))
    [trajectory] = group.trajectories
    assert (group.sampling.temperature, group.sampling.top_p) == pytest.approx((0.6, 0.9))
    temperatures = trajectory.token_temperatures(group.sampling)
    assert temperatures[:5] == pytest.approx(0.6) and temperatures[-6:] == pytest.approx(second_temperature)
    assert bool(trajectory.sampling_segments) == (second_temperature != 0.6)


async def test_a_session_whose_sampling_is_not_known_is_refused(
    gateway: Gateway, client: openai.AsyncOpenAI, queue: RedisReplayQueue
) -> None:
    await client.chat.completions.create(
        model="test", messages=QUESTION, extra_headers={"X-Penstock-Session": "of-an-older-gateway"}
    )
    key = RunKeys("test").session("of-an-older-gateway")
    call = generate_pb2.GenerateChunk.FromString(await queue.client.lindex(key, 0))
    call.ClearField("sampling")
    await queue.client.lset(key, 0, call.SerializeToString())
    refused = await gateway.rest.post("/v1/sessions/of-an-older-gateway/reward", json={"reward": 1})
    assert refused.status_code == 409 and "without its temperature" in refused.text


async def test_calls_that_do_not_continue_each_other_are_groups_of_their_own(
    gateway: Gateway, client: openai.AsyncOpenAI, queue: RedisReplayQueue
) -> None:
    session = {"X-Penstock-Session": "talk-2"}
    for question in ("2+2?", "something else"):
        messages: Any = [{"role": "user", "content": question}]
        await client.chat.completions.create(model="test", messages=messages, extra_headers=session)
    answer = (await gateway.rest.post("/v1/sessions/talk-2/reward", json={"reward": 1})).json()
    groups = [decode_group(await queue.get_group(prompt_id)) for prompt_id in answer["prompt_ids"]]
    assert [group.trajectories[0].reward for group in groups] == [1.0, 1.0]
    assert [int(group.trajectories[0].loss_mask.min()) for group in groups] == [1, 1]


async def test_generate_by_grpc_and_by_pin(gateway: Gateway, queue: RedisReplayQueue) -> None:
    generate = generate_pb2_grpc.GenerateServiceStub(gateway.channel)
    sampling = prompts_pb2.Sampling(temperature=1, top_p=1, max_tokens=9)
    request = generate_pb2.GenerateRequest(
        messages=[prompts_pb2.Message(role="user", content="2+2?")], sampling=sampling, session_id="pinned"
    )
    chunks = [chunk async for chunk in generate.Generate(request)]
    assert "".join(chunk.text for chunk in chunks) == "four" and chunks[0].server_id == "r0"

    await publish(queue, 2, 3)
    assert (await gateway.rest.put(f"{RUN}/pins/pinned", json={"policy_version": 2})).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError, match="no server serves version 2") as caught:
        [chunk async for chunk in generate.Generate(request)]
    assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    request.session_id = ""
    registry = PolicyRegistry(queue.client, "test")
    await registry.pin("r0", 3)
    with pytest.raises(grpc.aio.AioRpcError, match="every rollout server that is ready is pinned"):
        [chunk async for chunk in generate.Generate(request)]
    request.policy_version = 3
    assert [chunk async for chunk in generate.Generate(request)], "by its version it is asked all the same"
    request.ClearField("policy_version")
    await registry.unpin("r0")
    assert (await gateway.rest.post(f"{RUN}/servers/r0:drain")).status_code == 200
    with pytest.raises(grpc.aio.AioRpcError, match="no rollout server is ready"):
        [chunk async for chunk in generate.Generate(request)]


async def test_the_internal_service_wants_the_cluster_key(gateway: Gateway) -> None:
    [server] = (await gateway.rest.get(f"{RUN}/servers")).json()["servers"]
    async with grpc.aio.insecure_channel(server["address"], options=[("grpc.enable_http_proxy", 0)]) as channel:
        request = generate_pb2.GenerateRequest(text="hi", sampling=prompts_pb2.Sampling(max_tokens=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [chunk async for chunk in generate_pb2_grpc.GenerateServiceStub(channel).Generate(request)]
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
