"""Engines under many requests at once: each is answered as if it were alone, and dropped requests are freed."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import EngineStats
from penstock_rollout.engines.vllm.start import SchedulerLoad, create_llm, engine_arguments
from support.served_engines import LONG, Served, assert_log_probs, idle, start_engine
from support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_qwen2

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

NUM_REQUESTS = 256


@pytest_asyncio.fixture(
    loop_scope="module", scope="module", params=["torch", "vllm", pytest.param("sglang", marks=pytest.mark.long)]
)
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine that decodes 64 requests at once, so three of four requests wait."""
    served = await start_engine(request.param, tmp_path_factory.mktemp("model"))
    yield served
    await served.engine.stop()


def prompt_of(index: int) -> tuple[int, ...]:
    """A prompt whose length depends on the index, so that the rows of a batch are at different positions."""
    return tuple(2 + (index * 7 + place) % (VOCAB_SIZE - 2) for place in range(1 + index % 13))


async def test_256_requests_at_once_are_each_answered_as_if_alone(served: Served) -> None:
    """Temperatures, lengths and seeds differ between requests. None may leak into a neighbouring row."""
    samplings = [
        Sampling(temperature=(1.0, 0.7, 1.3)[index % 3], max_tokens=8 + index % 25, seed=index)
        for index in range(NUM_REQUESTS)
    ]
    samples = await asyncio.gather(
        *(served.answer(prompt_of(index), sampling) for index, sampling in enumerate(samplings))
    )
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample, sampling in zip(samples, samplings, strict=True):
        stopped = sample.finish_reason == "stop"
        assert stopped == (sample.token_ids[-1] == EOS_TOKEN_ID), "the stop token is kept, and only the last"
        assert EOS_TOKEN_ID not in sample.token_ids[:-1]
        assert len(sample.token_ids) == sampling.max_tokens or stopped
        assert_log_probs(served.model, sample, sampling.temperature)
    for index in (0, 100, 255):
        alone = await served.answer(prompt_of(index), samplings[index])
        assert alone.token_ids == samples[index].token_ids, "a seed gives the same answer, whatever other requests run"
    await idle(served)


async def test_the_samples_of_a_prompt_differ_and_repeat_with_their_seeds(served: Served) -> None:
    """The requests are those of a group: one prompt with neighbouring seeds."""

    async def group(first_seed: int | None) -> list[tuple[int, ...]]:
        seeds = [None if first_seed is None else first_seed + index for index in range(8)]
        asked = (served.answer((3, 4, 5), Sampling(max_tokens=16, seed=seed)) for seed in seeds)
        return [sample.token_ids for sample in await asyncio.gather(*asked)]

    first = await group(40)
    assert len(set(first)) > 6
    assert await group(40) == first
    assert (await group(44))[:4] == first[4:]
    assert await group(None) != await group(None), "without a seed, samples are drawn anew"


async def test_dropping_most_of_256_requests_frees_them(served: Served) -> None:
    """Running, waiting and half-finished requests are dropped. The others are not disturbed."""
    kept = [asyncio.create_task(served.answer(prompt_of(i), Sampling(max_tokens=60, seed=i))) for i in range(16)]
    dropped = [asyncio.create_task(served.answer(prompt_of(i), LONG)) for i in range(NUM_REQUESTS - 16)]
    stream: Any = served.chunks((4, 5), LONG)
    await anext(stream)
    stats = served.engine.stats()
    assert stats.running_requests + stats.waiting_requests > NUM_REQUESTS / 2
    await stream.aclose()
    for task in dropped:
        task.cancel()
    await asyncio.gather(*dropped, return_exceptions=True)
    for sample in await asyncio.gather(*kept):
        assert_log_probs(served.model, sample)
    assert await idle(served) == EngineStats(0, 0, 0.0)


@pytest.mark.parametrize(
    ("field", "complaint"),
    [({"max_model_len": 1 << 20}, "max_model_len"), ({"extra": {"no_such_option": 1}}, "no_such_option")],
)
def test_what_vllm_refuses_is_one_line(field: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    make_tiny_qwen2(tmp_path, seed=1)
    arguments = engine_arguments(EngineConfig(name="vllm", **field), tmp_path, "float32", seed=0)
    with pytest.raises(ConfigError, match=f"vLLM refuses rollout.engine: .*{complaint}") as refused:
        create_llm(arguments, SchedulerLoad())
    assert "\n" not in str(refused.value)
