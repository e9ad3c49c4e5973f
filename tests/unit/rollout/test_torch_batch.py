"""The torch engine's batch: prompts that rows have in common are prefilled once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.trajectory import Sampling
from penstock_rollout.engines.engine import GenerateRequest
from penstock_rollout.engines.torch.batch import DecodeBatch, ExpertRecorder, Row
from support.tiny_architectures import tiny_model
from support.tiny_models import make_tiny_qwen2

PROMPTS = [(5, 6, 7), (8, 9, 10), (5, 6, 7), (4, 3), (5, 6, 7)]


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
