"""Supervised fine-tuning: what of an example is trained, and that a model learns it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.main import main as cli
from penstock.errors import InvalidInput
from penstock_learner.sft_data import read_examples

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"
"""Its tokens are characters; its chat template is the contents, with an end token after the assistant's."""
EOS = 1


def ids(text: str) -> list[int]:
    return [3 + "0123456789+-*/=".index(character) for character in text]


def examples(tmp_path: Path, rows: list[dict[str, Any]]) -> list[tuple[list[int], int]]:
    found = read_examples(write(tmp_path, rows), AutoTokenizer.from_pretrained(MODEL))
    return [(example.token_ids, example.prompt_length) for example in found]


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")
    return folder / "data.parquet"


def test_each_shape_trains_what_it_says(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "34"}]
    expected = ([*ids("1+2=34"), EOS], 4)
    assert examples(tmp_path, [{"messages": messages}]) == [expected]
    assert examples(tmp_path, [{"prompt": "1+2=", "response": "34"}]) == [expected]
    assert examples(tmp_path, [{"prompt": messages[:1], "response": "34"}]) == [expected]
    assert examples(tmp_path, [{"text": "1+2=34"}]) == [([*ids("1+2=34"), EOS], 1)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "1"}, "row 0: has none of `messages`"),
        ({"messages": [{"role": "user", "content": "1"}]}, "ends with another message"),
        ({"prompt": "", "response": "1"}, "has none of"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        examples(tmp_path, [row])


def test_a_model_learns_the_answers_and_loads_again(tmp_path: Path) -> None:
    prompts = [f"{a}{b}+{b}{a}=" for a in range(1, 5) for b in range(5, 9)]
    data = write(tmp_path, [{"prompt": prompt, "response": prompt[0] * 2} for prompt in prompts])
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{path: {MODEL}}}\n"
        "learner: {lr: 3.0e-3, lr_schedule: cosine, micro_batch_tokens: 32, warmup_steps: 3}\n"
    )
    words = ["sft", "--config", str(config), "--data", str(data), "--out", str(tmp_path / "out")]
    assert cli([*words, "--epochs", "20", "--batch-size", "8"]) == 0
    questions = torch.tensor([ids(prompt) for prompt in prompts])
    right = {}
    for folder in (MODEL, tmp_path / "out"):
        with torch.no_grad():
            answers = AutoModelForCausalLM.from_pretrained(folder)(questions).logits[:, -1].argmax(-1)
        right[folder] = float((answers == questions[:, 0]).float().mean())
    assert right[MODEL] < 0.5 and right[tmp_path / "out"] == 1.0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert cli(words) == 2, "an existing folder is never written over"
