"""Harnesses and templates that make it hard to continue a session from the ids that were sampled."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio as redis

from penstock.client import PenstockClient
from penstock.config.run import WeightsConfig
from penstock.trajectory import VersionSegment
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from support.gateways import run_config, running
from support.scripted_engines import CHATML, END, called, make_tokenizer_folder, serving, spelled

ASKED: list[Any] = [{"role": "user", "content": "abc"}]
HEADERS = {"X-Penstock-Session": "s"}
CALL = called(json.dumps({"name": "f", "arguments": {"b": 1, "a": 2}}))
DONE = (*spelled("done"), END)
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESULTS_NEED_CALLS = CHATML.replace(
    "{% if message.role == 'tool' %}",
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% elif message.role == 'tool' %}",
)
"""A template like that of gpt-oss, which looks for the call of each result."""


@dataclass
class RehearsedEngine:
    """Gives its answers in order, token by token in a stream."""

    answers: Sequence[tuple[int, ...]]
    name: str = "rehearsed"
    policy_version: int = 3
    asked: list[GenerateRequest] = field(default_factory=list)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        ids = self.answers[len(self.asked)]
        self.asked.append(request)
        log_probs = tuple(-(place + 1) / 1024 for place in range(len(ids)))
        if not request.stream:
            yield TokenChunk(ids, log_probs, (VersionSegment(0, len(ids), 3),), "stop")
            return
        for place, (token, log_prob) in enumerate(zip(ids, log_probs, strict=True)):
            end = place + 1
            yield TokenChunk(
                (token,), (log_prob,), (VersionSegment(place, end, 3),), "stop" if end == len(ids) else None
            )


@asynccontextmanager
async def answering(
    redis_url: str, client: redis.Redis, folder: Path, *answers: tuple[int, ...], template: str = CHATML
) -> AsyncIterator[tuple[RehearsedEngine, openai.AsyncOpenAI, PenstockClient]]:
    """A gateway and a server whose engine gives these answers, and clients of it."""
    make_tokenizer_folder(folder, template)
    (folder / "cluster-key").write_text("secret")
    config = run_config(redis_url, folder).model_copy(
        update={"weights": WeightsConfig(cluster_key_file=folder / "cluster-key")}
    )
    engine = RehearsedEngine(answers)
    async with (
        serving(config, client, folder, {"r0": engine}, heartbeats=True),
        running(config) as gateway,
        openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0, default_headers=HEADERS
        ) as asked,
        PenstockClient(gateway.url, api_key=gateway.key) as penstock,
    ):
        yield engine, asked, penstock


async def paths_of(client: PenstockClient) -> list[tuple[int, ...]]:
    return [path.calls for path in (await client.get_session("s")).paths]


async def test_a_template_that_needs_the_calls_of_results_makes_forks(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> None:
    async with answering(redis_process.url, redis_client, tmp_path, CALL, DONE, template=RESULTS_NEED_CALLS) as (
        engine,
        asked,
        client,
    ):
        first = await asked.chat.completions.create(model="test", messages=ASKED, tools=[TOOL])
        message: Any = first.choices[0].message
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
        second = await asked.chat.completions.create(model="test", messages=[*ASKED, message, result], tools=[TOOL])
        assert second.choices[0].message.content == "done"
        assert await paths_of(client) == [(0,), (1,)]
        calls = (await client.get_session("s")).calls
        assert [call.token_ids for call in calls] == [CALL, DONE]
        assert calls[1].inserted_token_ids == tuple(engine.asked[1].prompt_token_ids), "all of it is as it was rendered"


async def test_text_after_a_call_is_part_of_the_same_answer_in_responses(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """A stream has it as a third item, which the client sends back by itself."""
    answer = (*spelled("go "), *CALL[:-1], *spelled("so be it"), END)
    async with answering(redis_process.url, redis_client, tmp_path, answer, DONE) as (_, asked, client):
        tools: Any = [{"type": "function", **TOOL["function"]}]
        events: Any = await asked.responses.create(model="test", input=ASKED, tools=tools, stream=True)
        items = [event.item.to_dict() async for event in events if event.type == "response.output_item.done"]
        assert [item["type"] for item in items] == ["message", "function_call", "message"]
        result: Any = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "4"}
        await asked.responses.create(model="test", input=[*ASKED, *items, result], tools=tools)
        assert await paths_of(client) == [(0, 1)]


async def test_several_choices_are_paths_and_the_one_that_is_used_goes_on(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> None:
    answers = [(*spelled(text), END) for text in ("one", "two", "three")]
    async with answering(redis_process.url, redis_client, tmp_path, *answers, DONE) as (_, asked, client):
        answer = await asked.chat.completions.create(model="test", messages=ASKED, n=3)
        assert sorted(str(choice.message.content) for choice in answer.choices) == ["one", "three", "two"]
        history: Any = [*ASKED, {"role": "assistant", "content": "two"}, {"role": "user", "content": "go on"}]
        await asked.chat.completions.create(model="test", messages=history)
        session = await client.get_session("s")
        used = next(call.number for call in session.calls if call.token_ids == answers[1])
        assert session.calls[3].parent == used
        assert sorted(path.calls for path in session.paths) == sorted(
            (number,) if number != used else (used, 3) for number in range(3)
        )
        assert sum(path.num_trained_tokens for path in session.paths) == sum(map(len, answers)) + len(DONE)


async def test_the_official_clients_do_not_repeat_a_call_of_a_session_that_is_closed(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """Both repeat a 409 twice by themselves, after seconds, and send the number of the try with each."""
    import anthropic  # takes seconds

    async with answering(redis_process.url, redis_client, tmp_path, DONE) as (_, asked, client):
        await asked.chat.completions.create(model="test", messages=ASKED)
        await client.reward_session("s", 1.0)
        with pytest.raises(openai.ConflictError, match="already has its reward") as refused:
            await asked.with_options(max_retries=1).chat.completions.create(model="test", messages=ASKED)
        assert refused.value.request.headers["x-stainless-retry-count"] == "0"
        base_url = str(asked.base_url).removesuffix("/v1/")
        async with anthropic.AsyncAnthropic(
            base_url=base_url, api_key=asked.api_key, max_retries=1, default_headers=HEADERS
        ) as other:
            with pytest.raises(anthropic.ConflictError, match="already has its reward") as also_refused:
                await other.messages.create(model="test", max_tokens=4, messages=ASKED)
        assert also_refused.value.request.headers["x-stainless-retry-count"] == "0"
