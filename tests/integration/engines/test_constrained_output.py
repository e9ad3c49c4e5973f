"""Constrained output of every engine, against transformers and xgrammar."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from penstock.config.rollout import EngineConfig
from penstock.errors import InvalidInput
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import Engine, GenerateRequest, OutputConstraint, TokenChunk
from support.answers import (
    CONSTRAINTS,
    Answer,
    Reference,
    constrained,
    fits_schema,
    json_of,
    write_model_with_text,
)
from support.served_engines import MAX_MODEL_LEN, TOLERANCE, Served, hold_decoding, make_engine

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

xgrammar = pytest.importorskip("xgrammar")
PROMPT = (20, 21, 22)


@dataclass(frozen=True)
class Started:
    engine: Engine
    reference: Reference

    def text(self, token_ids: tuple[int, ...]) -> str:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.reference.folder)
        return str(tokenizer.decode([token for token in token_ids if token not in self.reference.stop_ids]))


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["torch", "vllm"])
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    folder: Path = tmp_path_factory.mktemp("model")
    model = write_model_with_text(folder)
    config = EngineConfig(name=request.param, max_model_len=MAX_MODEL_LEN, max_num_seqs=16, keep_kv_cache=False)
    engine = make_engine(config, folder)
    await engine.start(policy_version=5)
    yield Started(engine, Reference(model, folder, any_whitespace=request.param == "vllm"))
    await engine.stop()


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize("sampling", [Sampling(max_tokens=400), Sampling(0.7, max_tokens=400, seed=3)])
async def test_answers_fit_and_their_log_probs_are_of_what_could_be_sampled(
    started: Started, kind: str, sampling: Sampling
) -> None:
    constraint = CONSTRAINTS[kind]
    asked = (
        constrained(started.engine, f"{kind}.{number}", (*PROMPT, 30 + number), sampling, constraint)
        for number in range(6)
    )
    for answer in await asyncio.gather(*asked):
        expected = started.reference.log_probs(answer, constraint, sampling.temperature)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=TOLERANCE, rtol=0)
        assert set(answer.versions) == {5}
        assert answer.finish_reason == "stop", "the schema bounds the length of all but white space"
        assert fits_schema(json_of(started.text(answer.token_ids), constraint))


async def test_requests_alongside_a_constrained_one_are_free(started: Started) -> None:
    free = GenerateRequest("free", PROMPT, Sampling(max_tokens=40, seed=4, ignore_eos=True))
    [alone] = [chunk async for chunk in started.engine.generate(free)]
    beside = asyncio.create_task(
        constrained(started.engine, "beside", PROMPT, Sampling(max_tokens=200), CONSTRAINTS["json_schema"])
    )
    [found] = [chunk async for chunk in started.engine.generate(free)]
    await beside
    assert found.token_ids == alone.token_ids


async def test_an_object_of_any_schema_can_be_asked_for(started: Started) -> None:
    constraint = OutputConstraint("json_object")
    for seed in range(4):
        answer = await constrained(started.engine, "object", PROMPT, Sampling(max_tokens=16, seed=seed), constraint)
        assert started.text(answer.token_ids).lstrip()[0] == "{", "a list or a number is JSON, but no object"


async def test_what_xgrammar_does_not_know_is_refused_by_name(started: Started) -> None:
    for constraint in (
        OutputConstraint("json_schema", '{"type": "what"}'),
        OutputConstraint("structural_tag", '{"type": "structural_tag", "format": {"type": "what"}}'),
    ):
        with pytest.raises(InvalidInput, match="response_format"):
            await constrained(started.engine, "refused", PROMPT, Sampling(max_tokens=16), constraint)
    answer = await constrained(started.engine, "next", PROMPT, Sampling(max_tokens=8), CONSTRAINTS["json_schema"])
    assert len(answer.token_ids) == 8


async def test_a_constraint_holds_across_an_update_in_flight(started: Started) -> None:
    """The last test: it changes the weights. KV is computed again, so the log-probs of both versions are exact."""
    schema = {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 120, "maxItems": 120}
    constraint, begun = OutputConstraint("json_schema", json.dumps(schema)), asyncio.Event()
    old, served = started.reference, Served(started.engine, started.reference.model)

    async def answer() -> Answer:
        chunks: list[TokenChunk] = []
        request = GenerateRequest("across", PROMPT, Sampling(max_tokens=480), stream=True, constraint=constraint)
        async for chunk in started.engine.generate(request):
            chunks.append(chunk)
            if not begun.is_set() and sum(len(chunk.token_ids) for chunk in chunks) >= 5:
                await hold_decoding(started.engine)
                begun.set()
        return Answer.of(PROMPT, chunks)

    answering = asyncio.create_task(answer())
    await asyncio.wait_for(begun.wait(), 120)
    await served.update(served.next_model())
    found = await asyncio.wait_for(answering, 120)
    flip = found.versions.index(6)
    assert found.versions == (5,) * flip + (6,) * (len(found.versions) - flip) and flip >= 5
    if found.finish_reason == "stop":
        assert len(json.loads(started.text(found.token_ids))) == 120
    new = replace(old, model=served.model)
    expected = torch.cat([old.log_probs(found, constraint, 1.0)[:flip], new.log_probs(found, constraint, 1.0)[flip:]])
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=TOLERANCE, rtol=0)
