"""Supervised fine-tuning: which part of an example is trained, and that a model learns it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.cli.main import main as cli
from penstock.errors import InvalidInput
from penstock_learner.sft.data import read_examples

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"
"""A tokenizer of characters. Its chat template joins the contents, with an end token after the assistant's."""
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
        ({"question": "1"}, "row 0: has no `messages`"),
        ({"messages": [{"role": "user", "content": "1"}]}, "does not end with a message of the assistant"),
        ({"prompt": "", "response": "1"}, "has no `messages`"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        examples(tmp_path, [row])


PROMPTS = [f"{a}{b}+{b}{a}=" for a in range(1, 5) for b in range(5, 9)]


def command(folder: Path, out: str) -> list[str]:
    """The arguments of a fine-tuning that teaches a wrong answer instead of the sum."""
    data = write(folder, [{"prompt": prompt, "response": prompt[0] * 2} for prompt in PROMPTS])
    config = folder / "run.yaml"
    config.write_text(
        f"model: {{path: {MODEL}}}\n"
        "learner: {lr: 3.0e-3, lr_schedule: cosine, micro_batch_tokens: 32, warmup_steps: 3}\n"
    )
    return ["sft", "--config", str(config), "--data", str(data), "--out", str(folder / out)]


def test_a_model_learns_the_answers_and_loads_again(tmp_path: Path) -> None:
    words = command(tmp_path, "out")
    assert cli([*words, "--epochs", "20", "--batch-size", "8"]) == 0
    questions = torch.tensor([ids(prompt) for prompt in PROMPTS])
    right = {}
    for folder in (MODEL, tmp_path / "out"):
        with torch.no_grad():
            answers = AutoModelForCausalLM.from_pretrained(folder)(questions).logits[:, -1].argmax(-1)
        right[folder] = float((answers == questions[:, 0]).float().mean())
    assert right[MODEL] < 0.5 and right[tmp_path / "out"] == 1.0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert cli(words) == 2, "an existing folder is never written over"


@pytest.mark.long
def test_two_ranks_of_torchrun_take_the_steps_of_one(tmp_path: Path) -> None:
    """16 rows do not divide into batches of 6, and the parts of two ranks differ in length."""
    losses, weights = [], []
    for num_ranks in (1, 2):
        out = f"out-{num_ranks}"
        words = [*command(tmp_path, out), "--epochs", "2", "--batch-size", "6"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        run = subprocess.run(
            [sys.executable, *torchrun, "-m", "penstock.cli.main", *words],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        losses.append([float(loss) for loss in re.findall(r"step \d+ of 6 loss ([\d.]+)", run.stdout + run.stderr)])
        weights.append(load_file(tmp_path / out / "model.safetensors"))
    assert len(losses[0]) == len(losses[1]) == 6, "only one rank prints the result"
    assert losses[0] == pytest.approx(losses[1], abs=2e-4) and losses[0][0] > 2 * losses[0][-1]
    one, two = weights
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-5, rtol=1e-4)
