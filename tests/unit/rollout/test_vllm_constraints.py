"""What constrained requests become in vLLM and SGLang, without an engine that runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.config.rollout import EngineConfig
from penstock.errors import InvalidInput
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest, OutputConstraint
from penstock_rollout.engines.sglang.engine import SglangEngine
from penstock_rollout.engines.vllm.engine import VllmEngine, sampling_params
from penstock_rollout.engines.vllm.start import engine_arguments
from support.answers import CONSTRAINTS

REQUEST = GenerateRequest("r", (5, 6), Sampling(max_tokens=4), constraint=CONSTRAINTS["json_schema"])


def test_vllm_loads_the_tokenizer_of_a_folder_that_has_one(tmp_path: Path) -> None:
    config = EngineConfig(name="vllm")
    assert engine_arguments(config, tmp_path, "float32", seed=0)["skip_tokenizer_init"] is True
    (tmp_path / "tokenizer_config.json").write_text("{}")
    arguments = engine_arguments(config, tmp_path, "float32", seed=0)
    assert arguments["skip_tokenizer_init"] is False and arguments["logprobs_mode"] == "processed_logprobs"
    assert engine_arguments(EngineConfig(extra={"skip_tokenizer_init": True}), tmp_path, "float32", seed=0)[
        "skip_tokenizer_init"
    ], "extra wins"


def test_each_kind_of_constraint_has_its_field_in_vllm() -> None:
    pytest.importorskip("vllm")
    for constraint, field, value in (
        (CONSTRAINTS["json_schema"], "json", CONSTRAINTS["json_schema"].text),
        (CONSTRAINTS["structural_tag"], "structural_tag", CONSTRAINTS["structural_tag"].text),
        (OutputConstraint("json_object"), "json_object", True),
    ):
        params = sampling_params(GenerateRequest("r", (5,), Sampling(), constraint=constraint), [0, 1])
        assert getattr(params.structured_outputs, field) == value
        assert not params.ignore_eos and params.stop_token_ids == [0, 1]
    free = sampling_params(GenerateRequest("r", (5,), Sampling()), [0, 1])
    assert free.structured_outputs is None and free.ignore_eos and free.stop_token_ids == [0, 1]


class _Refusing:
    """An AsyncLLM that refuses every request."""

    errored = False

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        raise self._error
        yield


def _refused_by(error: Exception, request: GenerateRequest, folder: Path) -> InvalidInput:
    engine = VllmEngine(EngineConfig(name="vllm", max_model_len=8), folder, "float32", seed=0)
    engine._llm, engine._broken = _Refusing(error), ""

    class Stamps:
        of = staticmethod(nullcontext)

    engine._stamps = Stamps()  # type: ignore[assignment]

    async def ask() -> None:
        _ = [chunk async for chunk in engine.generate(request)]

    with pytest.raises(InvalidInput) as refusal:
        asyncio.run(ask())
    return refusal.value


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_refusal_of_vllm_names_what_it_refuses(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.engine.exceptions import EngineGenerateError

    missing = EngineGenerateError()
    missing.__cause__ = ModuleNotFoundError("No module named 'xgrammar'")
    found = _refused_by(missing, REQUEST, tmp_path)
    assert found.field == "response_format" and "xgrammar" in str(found)
    assert _refused_by(ValueError("what"), REQUEST, tmp_path).field == "response_format"
    long = GenerateRequest("r", tuple(range(8)), Sampling(max_tokens=4), constraint=REQUEST.constraint)
    assert _refused_by(ValueError("too long"), long, tmp_path).field == "prompt_token_ids"


def test_sglang_refuses_a_constraint_by_name(tmp_path: Path) -> None:
    engine = SglangEngine(EngineConfig(name="sglang"), tmp_path, "float32", seed=0)
    with pytest.raises(InvalidInput, match="response_format: or a constrained tool call .* use vllm or torch"):
        engine._check(REQUEST)
