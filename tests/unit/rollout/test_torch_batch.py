"""The torch engine's batch: prompts that rows have in common are prefilled once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.errors import ConfigError
from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.factory import check_serves_model
from penstock_rollout.engines.torch.batch import DecodeBatch, ExpertRecorder, Row
from support.tiny_architectures import ARCHITECTURES, COMPOSITES, tiny_config, tiny_model
from support.tiny_models import make_tiny_qwen2

PROMPTS = [(5, 6, 7), (8, 9, 10), (5, 6, 7), (4, 3), (5, 6, 7)]


REFUSED = """
    axk2 bamba deepseek_v32 deepseek_v4 falcon_mamba glm5_next glm_moe_dsa granitemoehybrid hy_v4 inkling_text jamba
    mamba mamba2 minimax nemotron_h nemotron_h_omni openai-gpt paligemma qwen4_exp recurrent_gemma rwkv xlstm zamba2
"""
"""Types that the torch engine refuses. The tiny models of bamba, granitemoehybrid and jamba have no attention."""
ALSO_REFUSED = {*REFUSED.split(), "nemotron_h, groups", "falcon_h1, norm"}
BY_LENGTH = {"llama, dynamic rope", "llama4_text, temperature", "phi3, longrope"}
"""What these compute for a token depends on the length of the whole sequence, which is not known when it is drawn."""
FAST = {"gemma3", "qwen3_5", "falcon_h1", "nemotron_h", "mamba"}


def rows_of(batch: DecodeBatch) -> list[Row]:
    return [
        batch.new_row(GenerateRequest(f"row-{number}", prompt, Sampling(max_tokens=6, seed=number, ignore_eos=True)))
        for number, prompt in enumerate(PROMPTS)
    ]


def generate(batch: DecodeBatch, joins: list[list[Row]]) -> None:
    for rows in joins:
        batch.join(rows, 0)
    while batch.rows:
        batch.step(0)


def assert_same(together: list[Row], alone: list[Row]) -> None:
    for one, other in zip(together, alone, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=1e-5)
    assert together[0].tokens != together[2].tokens, "each sample of a prompt has a seed of its own"


def test_rows_with_the_same_prompt_are_prefilled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(make_tiny_qwen2(tmp_path / "model", seed=1)).eval()
    prefilled: list[tuple[int, ...]] = []
    forward = model.forward

    def counted(*args: Any, **given: Any) -> Any:
        if given["input_ids"].shape[1] > 1:
            prefilled.append(tuple(given["input_ids"].shape))
        return forward(*args, **given)

    monkeypatch.setattr(model, "forward", counted)
    together, alone = (DecodeBatch(model, frozenset(), 64, 0) for _ in range(2))
    rows, expected = rows_of(together), rows_of(alone)
    generate(together, [rows])
    assert prefilled == [(1, 2), (2, 3)]
    generate(alone, [[row] for row in expected])
    assert_same(rows, expected)


def test_every_row_reports_the_experts_of_its_prompt() -> None:
    model: Any = tiny_model("qwen3_moe").eval()
    recorder = ExpertRecorder(model)
    together, alone = (DecodeBatch(model, frozenset(), 64, 0, recorder) for _ in range(2))
    rows, expected = rows_of(together), rows_of(alone)
    generate(together, [rows])
    generate(alone, [[row] for row in expected])
    assert_same(rows, expected)
    for one, other in zip(rows, expected, strict=True):
        for chosen, wanted in zip(one.experts, other.experts, strict=True):
            assert chosen.tolist() == wanted.tolist()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.long)
        for name in [*ARCHITECTURES, *COMPOSITES]
        if name not in BY_LENGTH
    ],
)
def test_rows_that_join_and_end_at_different_times_are_right_or_refused(name: str, tmp_path: Path) -> None:
    if name in ALSO_REFUSED:
        tiny_config(name).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="set rollout.engine.name to vllm"):
            check_serves_model("torch", tmp_path)
            DecodeBatch(tiny_model(name), frozenset(), 64, 0)
        return
    model: Any = tiny_model(name)
    batch = DecodeBatch(model, frozenset(), 64, 0)
    prompts = [(5, 6, 7), tuple(range(8, 30)), (5, 6, 7), (4, 3), tuple(range(20, 33))]
    rows = [
        batch.new_row(
            GenerateRequest(f"row-{index}", prompt, Sampling(max_tokens=6 + 3 * index, seed=index, ignore_eos=True))
        )
        for index, prompt in enumerate(prompts)
    ]
    batch.join(rows[:3], 0)
    batch.step(0)
    generate(batch, [rows[3:]])
    for row, prompt in zip(rows, prompts, strict=True):
        ids = torch.tensor([row.tokens])
        with torch.no_grad():
            log_probs = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float().log_softmax(1)
        expected = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.log_probs), expected, atol=1e-3, rtol=0)
