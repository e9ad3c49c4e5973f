"""Prompts that are too long are truncated, or dead-lettered at once and counted. So are prompts of sessions."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.codec import encode_prompt
from penstock.config.rollout import AgentsConfig, PromptConfig, RolloutConfig
from penstock.config.service import ReplayConfig
from penstock.errors import PromptTooLong
from penstock.replay.queue_types import Lease
from penstock.trajectory import SESSION_AGENT, Group, Prompt
from penstock.v1 import generate_pb2, prompts_pb2
from penstock_rollout.agents.loops import Agents
from penstock_rollout.groups.producer import Producer
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import PromptLength, Tokenization
from support.memory_queue import MemoryReplayQueue
from support.memory_store import MemoryStore

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"
IDS = tuple(range(10))


def fit(overlong: Any, max_tokens: int | None, max_model_len: int = 100) -> PromptLength:
    config = PromptConfig(overlong=overlong, max_tokens=max_tokens)
    return PromptLength(config, max_model_len, RolloutMetrics(CollectorRegistry()))


@pytest.mark.parametrize(
    ("overlong", "max_tokens", "expected"),
    [
        ("truncate_left", 4, (6, 7, 8, 9)),
        ("truncate_right", 4, (0, 1, 2, 3)),
        ("truncate_middle", 4, (0, 1, 8, 9)),
        ("truncate_middle", 5, (0, 1, 2, 8, 9)),
        ("truncate_middle", 1, (0,)),
    ],
)
def test_long_prompts_are_truncated(overlong: str, max_tokens: int, expected: tuple[int, ...]) -> None:
    length = fit(overlong, max_tokens)
    assert length.fit(IDS) == expected
    assert length.fit(IDS[:max_tokens]) == IDS[:max_tokens]
    assert length.metrics.prompts_truncated._value.get() == 1


def test_the_models_length_leaves_room_for_a_token() -> None:
    assert fit("filter", None, max_model_len=11).fit(IDS) == IDS
    for length in (fit("filter", None, max_model_len=10), fit("filter", 50, max_model_len=10)):
        with pytest.raises(PromptTooLong, match="10 tokens are more than 9"):
            length.fit(IDS)


def test_the_tokens_of_the_chat_template_count() -> None:
    prompt = Prompt(messages=(("user", "12+34="),))
    num_tokens = len(Tokenization(MODEL).prompt_ids(prompt))
    assert Tokenization(MODEL, fit("filter", num_tokens).fit).prompt_ids(prompt)
    with pytest.raises(PromptTooLong):
        Tokenization(MODEL, fit("filter", num_tokens - 1).fit).prompt_ids(prompt)
    cut = Tokenization(MODEL, fit("truncate_left", 3).fit).prompt_ids(prompt)
    assert cut == Tokenization(MODEL).prompt_ids(prompt)[-3:]
    with pytest.raises(PromptTooLong):
        Tokenization(MODEL, fit("filter", 2).fit).prompt_ids(Prompt(token_ids=(1, 2, 3)))


@pytest.mark.parametrize("overlong", ["filter", "truncate_left"])
def test_generate_calls_are_limited_by_the_model_alone(overlong: str) -> None:
    """A session's history grows beyond what a prompt of the queue may have, and no call is answered from a part."""
    tokenization = Tokenization(MODEL, fit(overlong, 3).fit)
    service = GenerateService("test", "rollout-0", cast("Any", None), tokenization, 100)
    question = prompts_pb2.Message(role="user", content="12+34=")
    whole = Tokenization(MODEL).prompt_ids(Prompt(messages=(("user", "12+34="),)))
    assert service._prompt_ids(generate_pb2.GenerateRequest(messages=[question])) == whole
    history = np.array(whole, dtype="<i4").tobytes()
    for request in (
        generate_pb2.GenerateRequest(token_ids=history),
        generate_pb2.GenerateRequest(messages=[question], history_token_ids=history),
        generate_pb2.GenerateRequest(text="12", history_token_ids=history),
    ):
        assert service._prompt_ids(request)[: len(whole)] == whole
    with pytest.raises(PromptTooLong, match="maximum context length is 100 tokens"):
        service._sampling(generate_pb2.GenerateRequest(), 100)


class Maker:
    """Renders prompts as a server does, and generates nothing."""

    def __init__(self) -> None:
        self.tokenization = Tokenization(MODEL, fit("filter", 6).fit)

    async def make(self, lease: Lease, prompt: Prompt, *_: object) -> Group:
        Agents.load(AgentsConfig(), 100, self.tokenization).find(prompt.agent_name)
        self.tokenization.prompt_ids(prompt)
        await asyncio.Event().wait()
        raise AssertionError


async def test_prompts_that_no_attempt_can_make_are_dead_lettered_at_once() -> None:
    """Those that are too long, and those of a session whose gateway was away for longer than a lease."""
    replay = ReplayConfig(max_attempts=5)
    queue = MemoryReplayQueue(MemoryStore(), replay)
    prompts = [Prompt(messages=(("user", "1+2="),)), Prompt(messages=(("user", "1111+2222="),))]
    of_session = Prompt(token_ids=(1, 2), agent_name=SESSION_AGENT)
    await queue.submit([encode_prompt(prompt) for prompt in (*prompts, of_session)], [0, 0, 0], "")
    await queue.create_evaluation("held-out", [encode_prompt(prompts[1])])
    maker: Any = Maker()
    producer = Producer(
        queue, "s", maker, RolloutConfig(), replay, RolloutMetrics(CollectorRegistry()), may_lease=lambda: True
    )
    loop = asyncio.create_task(producer.lease_loop())
    try:
        async with asyncio.timeout(60):
            while (await queue.stat()).dead_lettered < 2 or (await queue.get_evaluation("held-out")).num_finished == 0:
                await asyncio.sleep(0.01)
    finally:
        await end_task(loop)
        await producer.drain()
    assert await queue.dead_letter_reasons() == {"prompt_too_long": 1, "session": 1}
    assert (await queue.stat()).pending_prompts == 1
    assert producer.metrics.failures.labels("prompt_too_long")._value.get() == 2
