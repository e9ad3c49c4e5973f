"""Calls of a session that do not end as they should: streams that are left, and sessions that end meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio as redis

from penstock.client import PenstockClient
from penstock.config.run import WeightsConfig
from penstock.errors import NotFound
from penstock.replay.queue import RedisReplayQueue
from penstock.store.keys import RunKeys
from penstock.trajectory import VersionSegment
from penstock_rollout.engines.engine import GenerateRequest, TokenChunk
from support.gateways import Gateway, run_config, running
from support.scripted_engines import END, make_tokenizer_folder, serving, spelled

HEADERS = {"X-Penstock-Session": "s"}
ASKED: list[Any] = [{"role": "user", "content": "abc"}]


@dataclass
class HaltingEngine:
    """Says "a", and the rest of "abc" when it is told to go on."""

    name: str = "halting"
    policy_version: int = 3
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """How each request ended."""
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    """Can be acquired once for each request."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.begun.release()
        try:
            yield TokenChunk(tuple(spelled("a")), (-0.5,), (VersionSegment(0, 1, 3),))
            await self.goes_on.wait()
            rest = (*spelled("bc"), END)
            yield TokenChunk(rest, (-0.25,) * len(rest), (VersionSegment(1, 1 + len(rest), 4),), "stop")
        except (asyncio.CancelledError, GeneratorExit):
            self.ended.put_nowait("aborted")
            raise
        self.ended.put_nowait("whole")


@pytest.fixture
async def halting(
    redis_process: Any, redis_client: redis.Redis, tmp_path: Path
) -> AsyncIterator[tuple[Gateway, HaltingEngine, openai.AsyncOpenAI, PenstockClient]]:
    make_tokenizer_folder(tmp_path)
    (tmp_path / "cluster-key").write_text("secret")
    config = run_config(redis_process.url, tmp_path).model_copy(
        update={"weights": WeightsConfig(cluster_key_file=tmp_path / "cluster-key")}
    )
    engine = HaltingEngine()
    async with (
        serving(config, redis_client, tmp_path, {"r0": engine}, heartbeats=True),
        running(config) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=gateway.key, max_retries=0) as asked,
        PenstockClient(gateway.url, api_key=gateway.key) as client,
    ):
        yield gateway, engine, asked, client


async def opened_stream(asked: openai.AsyncOpenAI) -> Any:
    """A stream whose first word has arrived."""
    stream = await asked.chat.completions.create(model="test", messages=ASKED, stream=True, extra_headers=HEADERS)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    return stream


async def test_a_stream_that_the_client_leaves_is_aborted_and_not_recorded(
    halting: tuple[Gateway, HaltingEngine, openai.AsyncOpenAI, PenstockClient],
) -> None:
    _, engine, asked, client = halting
    stream = await opened_stream(asked)
    await stream.close()
    async with asyncio.timeout(100):
        assert await engine.ended.get() == "aborted", "nobody waits for the rest"
    with pytest.raises(NotFound):
        await client.get_session("s")
    # The harness tries again. It is the first call, and is trained alone.
    engine.goes_on.set()
    await asked.chat.completions.create(model="test", messages=ASKED, extra_headers=HEADERS)
    session = await client.get_session("s")
    assert [(call.parent, call.policy_versions) for call in session.calls] == [(None, (3, 4, 4, 4))]


async def test_a_call_that_the_client_leaves_is_aborted_and_not_recorded(
    halting: tuple[Gateway, HaltingEngine, openai.AsyncOpenAI, PenstockClient],
) -> None:
    """As SDKs do it: they wait until their timeout, and ask again."""
    _, engine, asked, client = halting
    options: Any = {"model": "test", "messages": ASKED, "extra_headers": HEADERS}
    waiting = asyncio.create_task(asked.chat.completions.create(**options))
    async with asyncio.timeout(100):
        await engine.begun.acquire()
        waiting.cancel()
        assert await engine.ended.get() == "aborted", "nobody reads the answer"
    engine.goes_on.set()
    await asked.chat.completions.create(**options)
    session = await client.get_session("s")
    assert [path.calls for path in session.paths] == [(0,)], "only the answer that the harness has is trained"


async def test_a_stream_is_recorded_as_it_was_sampled(
    halting: tuple[Gateway, HaltingEngine, openai.AsyncOpenAI, PenstockClient],
) -> None:
    _, engine, asked, client = halting
    stream = await opened_stream(asked)
    engine.goes_on.set()
    assert [chunk async for chunk in stream]
    [call] = (await client.get_session("s")).calls
    assert call.token_ids == (*spelled("abc"), END) and call.policy_versions == (3, 4, 4, 4)
    assert call.log_probs == (-0.5, -0.25, -0.25, -0.25)


async def test_a_reward_that_comes_while_a_call_runs_leaves_the_call_out(
    halting: tuple[Gateway, HaltingEngine, openai.AsyncOpenAI, PenstockClient], queue: RedisReplayQueue
) -> None:
    _, engine, asked, client = halting
    engine.goes_on.set()
    await asked.chat.completions.create(model="test", messages=ASKED, extra_headers=HEADERS)
    engine.goes_on.clear()
    stream = await opened_stream(asked)
    [prompt_id] = (await client.reward_session("s", 1.0)).prompt_ids
    engine.goes_on.set()
    with pytest.raises(openai.APIError, match="not recorded"):
        [chunk async for chunk in stream]
    group = await client.get_group(prompt_id)
    assert [sum(path.loss_mask) for path in group.trajectories] == [4]
    assert (await queue.stat()).queued == 1


async def test_a_session_that_expires_while_a_call_runs_begins_again(
    halting: tuple[Gateway, HaltingEngine, openai.AsyncOpenAI, PenstockClient], redis_client: redis.Redis
) -> None:
    _, engine, asked, client = halting
    engine.goes_on.set()
    await asked.chat.completions.create(model="test", messages=ASKED, extra_headers=HEADERS)
    engine.goes_on.clear()
    history = [*ASKED, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "ok"}]
    running_call = asyncio.create_task(
        asked.chat.completions.create(model="test", messages=history, extra_headers=HEADERS)
    )
    async with asyncio.timeout(100):
        await engine.begun.acquire()
        await engine.begun.acquire()  # The second call has read the session by now.
    keys = RunKeys("test")
    await redis_client.delete(keys.session("s", "calls"), keys.session("s", "state"))
    engine.goes_on.set()
    with pytest.raises(openai.ConflictError, match="has expired"):
        await running_call
    await asked.chat.completions.create(model="test", messages=history, extra_headers=HEADERS)
    [call] = (await client.get_session("s")).calls
    assert call.parent is None and call.num_inserted == call.num_prompt_tokens
