"""vLLM with hybrid models, also within composite ones: updates in flight, and what it refuses."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.rollout import EngineConfig
from penstock.errors import ConfigError
from penstock.trajectory import Sampling
from penstock_learner.model.causal_lm import load_model
from penstock_learner.model.published_layout import fit_to_folder
from penstock_rollout.engines.factory import create_engine
from penstock_rollout.engines.vllm.start import SchedulerLoad, create_llm, engine_arguments, is_cpu_build
from support.answers import Answer
from support.served_engines import LONG, Served, expected_log_probs
from support.tiny_architectures import tiny_model
from support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
HAS_VISION = importlib.util.find_spec("torchvision") is not None
COMPOSITE = pytest.mark.skipif(not HAS_VISION, reason="vLLM imports these only with torchvision")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 1024, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "eos_token_id": EOS_TOKEN_ID, "bos_token_id": 0,
}  # fmt: skip
"""Heads have the sizes that vLLM's kernels for CPUs take."""


def write_hybrid(name: str, folder: Path) -> None:
    model = tiny_model(name, **SIZES)
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.bfloat16().save_pretrained(folder)
    write_tokenizer(folder, VOCAB_SIZE)


def opened(folder: Path, dtype: torch.dtype) -> Any:
    """The language model as the learner opens and pushes it."""
    lm = load_model(folder, dtype, 16).lm
    lm.set_attn_implementation({"": "eager", "text_config": "eager"})
    fit_to_folder(lm, folder, "model.path")
    return lm


def errors(answers: list[Answer], exact: Any, rounded: Any) -> tuple[float, float]:
    """Mean errors of the answers' log-probs and of transformers' in bfloat16, from those in float32."""
    rounded.load_state_dict(exact.state_dict())
    differences = [
        torch.stack([torch.tensor(answer.log_probs), expected_log_probs(rounded, answer)])
        - expected_log_probs(exact, answer)
        for answer in answers
    ]
    ours, theirs = torch.cat(differences, dim=1).abs().mean(dim=1).tolist()
    return ours, theirs


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["qwen3_next", *(pytest.param(each, marks=COMPOSITE) for each in ("qwen3_5", "qwen3_5_moe"))],
)
async def test_hybrid_models_are_updated_in_flight(name: str, tmp_path: Path) -> None:
    write_hybrid(name, tmp_path)
    exact, rounded = opened(tmp_path, torch.float32), opened(tmp_path, torch.bfloat16)
    config = EngineConfig(name="vllm", max_model_len=512, max_num_seqs=16, keep_kv_cache=False)
    served = Served(create_engine(config, tmp_path, "bfloat16", seed=0), exact)
    await served.engine.start(5)

    async def check_serves(version: int) -> None:
        asked = (served.answer(tuple(range(3, 4 + 5 * index)), Sampling(max_tokens=24)) for index in range(8))
        answers = await asyncio.gather(*asked)
        assert {stamp for answer in answers for stamp in answer.versions} == {version}
        ours, theirs = errors(answers, served.model, rounded)
        assert ours < 2 * theirs < 0.2, "the engine is as near to the exact log-probs as transformers in bfloat16"

    try:
        await check_serves(5)
        for _ in range(2):
            before, stream = served.model, served.chunks((5, 6, 7), LONG)
            chunks = [await anext(stream) for _ in range(8)]
            later = served.next_model()
            later.load_state_dict({key: tensor.bfloat16().float() for key, tensor in later.state_dict().items()})
            version = await served.update(later)
            answer = Answer.of((5, 6, 7), chunks + [chunk async for chunk in stream])
            num_old = answer.versions.count(version - 1)
            assert 0 < num_old < len(answer.versions) == answer.versions.count(version) + num_old
            found = torch.tensor(answer.log_probs)
            wrong = [(found - expected_log_probs(model, answer)).abs() for model in (before, later)]
            for part in (slice(num_old), slice(num_old, None)):
                assert wrong[0][part].mean() < 0.1 < wrong[1][part].mean(), "these are tokens of this version"
                wrong.reverse()
            await check_serves(version)
    finally:
        await served.engine.stop()


def refusal(folder: Path, dtype: str) -> str:
    arguments = engine_arguments(EngineConfig(name="vllm", max_model_len=512), folder, dtype, seed=0)
    with pytest.raises(ConfigError) as refused:
        create_llm(arguments, SchedulerLoad())
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.skipif(not is_cpu_build(), reason="GPUs compute them in every type")
def test_a_type_with_which_vllm_would_die_at_a_request_is_refused(tmp_path: Path) -> None:
    write_hybrid("qwen3_next", tmp_path)
    assert "in bfloat16 only on a CPU; set model.dtype to bfloat16" in refusal(tmp_path, "float32")


@pytest.mark.skipif(HAS_VISION or not is_cpu_build(), reason="torchvision is installed")
def test_a_missing_package_is_named(tmp_path: Path) -> None:
    write_hybrid("qwen3_5", tmp_path)
    assert "No module named 'torchvision'); install what is missing" in refusal(tmp_path, "bfloat16")
