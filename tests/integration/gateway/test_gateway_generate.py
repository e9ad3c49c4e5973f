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

from penstock.client import retries
from penstock.codec import decode_group, decode_prompt
from penstock.config.run import WeightsConfig
from penstock.errors import PromptTooLong
from penstock.internal_calls import ClusterKey
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, ServerRecord
from penstock.store.keys import RunKeys
from penstock.trajectory import SESSION_AGENT
from penstock.v1 import generate_pb2, generate_pb2_grpc, prompts_pb2, sessions_pb2, sessions_pb2_grpc
from penstock_rollout.fleet.membership import make_listener
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import Tokenization
from support.gateways import RUN, Gateway, publish, run_config, running
from support.scripted_engines import END, LOG_PROB, ScriptedEngine, make_tokenizer_folder, spelled

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
    assert (await client.models.retrieve("test@3")).id == "test@3"
    for name, message in (
        ("test@9", "no server serves version 9, only [3]"), ("gpt", "must be test or test@VERSION"),
        ("a/b@c", "must be test or test@VERSION"),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model=name, messages=QUESTION)
        error = missing.value
        assert (error.type, error.code, error.param) == ("invalid_request_error", "model_not_found", "model")
        assert message in str(error.body["message"]) and message in error.message  # type: ignore[index, call-overload]
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; the models are test, test@3"):
        await client.models.retrieve("gpt")


async def test_what_is_not_offered_is_refused_by_its_name(client: openai.AsyncOpenAI) -> None:
    refused: dict[str, Any] = {
        "tools": [{"type": "custom", "custom": {"name": "f"}}], "n": 0, "temperature": -1, "top_p": 0,
        "response_format": {"type": "json_object"}, "stop": [""], "max_tokens": 0, "frequency_penalty": 0.5,
        "logit_bias": {"5": 1}, "top_logprobs": 2, "reasoning_effort": "low",
    }  # fmt: skip
    for name, value in refused.items():
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="test", messages=QUESTION, **{name: value})
        error = wrong.value
        assert (error.type, error.code) == ("invalid_request_error", "invalid_input"), name
        assert (error.param or "").startswith(name), (name, error.param, error.message)
    for body in ({"top_j": 5}, {"stream_options": {"usage": True}}, {"messages": [{**QUESTION[0], "audio": 1}]}):
        with pytest.raises(openai.BadRequestError, match="top_j|stream_options.usage|messages.0..audio"):
            await client.chat.completions.create(model="test", messages=QUESTION, extra_body=body)
    with pytest.raises(openai.BadRequestError, match="echo: is not supported"):
        await client.completions.create(model="test", prompt="a", echo=True)


async def test_messages_with_tool_calls_are_answered(client: openai.AsyncOpenAI) -> None:
    function = {"name": "add", "arguments": '{"a": 2}'}
    call = {"id": "c1", "type": "function", "function": function}
    turns: Any = [
        *QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "5"},
    ]  # fmt: skip
    answered = await client.chat.completions.create(model="test", messages=turns)
    assert answered.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="tool_calls"):
        await client.chat.completions.create(model="test", messages=[{**turns[1], "tool_calls": "add"}])


async def test_options_that_change_nothing_are_accepted(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(
        model="test", messages=QUESTION, user="me", store=False, metadata={"a": "b"}, presence_penalty=0, logit_bias={},
        top_logprobs=0, tool_choice="auto", parallel_tool_calls=True, response_format={"type": "text"}, n=1,
    )  # fmt: skip
    answered: Any = first.choices[0].message.model_dump()
    assert {"refusal", "tool_calls"} <= answered.keys()
    turns = [*QUESTION, answered, {"role": "user", "content": [{"type": "text", "text": "and 1?"}]}]
    again = await client.chat.completions.create(model="test", messages=turns)
    assert again.choices[0].message.content == "five!"


async def test_a_wrong_key_is_an_authentication_error_of_openai(gateway: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.models.list()
    assert (refused.value.type, refused.value.code) == ("authentication_error", "invalid_api_key")


async def test_a_prompt_that_is_too_long_has_its_own_reason_in_both_protocols(gateway: Gateway) -> None:
    """The rollout server refuses it. Its reason and field reach the client."""
    detail = (
        "prompt: the prompt is too long: 300 tokens, and this model's maximum context length is 256 tokens with the "
        "answer; send a shorter one"
    )
    response = await gateway.rest.post("/v1/completions", json={"model": "test", "prompt": [5] * 300})
    problem = response.json()
    assert (response.status_code, problem["reason"], problem["field"]) == (400, "PROMPT_TOO_LONG", "prompt")
    assert problem["detail"] == detail == problem["error"]["message"]
    assert (problem["error"]["code"], problem["error"]["param"]) == ("context_length_exceeded", "prompt")
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
    sessions = sessions_pb2_grpc.SessionServiceStub(gateway.channel)
    for value in (1e300, -1e300, 1e39):
        refused = await gateway.rest.post(path, json={"reward": value})
        assert refused.status_code == 400 and refused.json()["field"] == "reward", refused.text
        with pytest.raises(grpc.aio.AioRpcError) as bad:
            await sessions.RewardSession(sessions_pb2.RewardSessionRequest(session_id="talk-1", reward=value))
        assert bad.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    answer = (await gateway.rest.post(path, json={"reward": 0.75, "reward_parts": {"polite": 1.0}})).json()
    assert len(answer["prompt_ids"]) == 1 and not answer["replayed"]
    again = await sessions.RewardSession(sessions_pb2.RewardSessionRequest(session_id="talk-1", reward=0.75))
    assert (list(again.prompt_ids), again.replayed) == (answer["prompt_ids"], True)

    group = decode_group(await queue.get_group(answer["prompt_ids"][0]))
    [trajectory] = group.trajectories
    assert (trajectory.reward, trajectory.reward_parts, group.server_id) == (0.75, {"polite": 1.0}, "session")
    stored = decode_prompt(await queue.client.hget(RunKeys("test").prompts, answer["prompt_ids"][0]))
    assert stored.agent_name == group.agent_name == SESSION_AGENT, "no rollout server samples it"
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
    assert "already has its reward" in over.value.message
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


async def test_calls_that_do_not_continue_each_other_are_paths_of_one_episode(
    gateway: Gateway, client: openai.AsyncOpenAI, queue: RedisReplayQueue
) -> None:
    session = {"X-Penstock-Session": "talk-2"}
    for question in ("2+2?", "something else"):
        messages: Any = [{"role": "user", "content": question}]
        await client.chat.completions.create(model="test", messages=messages, extra_headers=session)
    [prompt_id] = (await gateway.rest.post("/v1/sessions/talk-2/reward", json={"reward": 1})).json()["prompt_ids"]
    group = decode_group(await queue.get_group(prompt_id))
    assert [(path.reward, path.episode) for path in group.trajectories] == [(1.0, 1), (1.0, 1)]
    sampled = [path.token_ids[path.loss_mask == 1].tolist() for path in group.trajectories]
    assert sampled == [[*spelled("four"), END], [*spelled("five!"), END]]


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
