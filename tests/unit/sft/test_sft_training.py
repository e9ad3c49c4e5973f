"""Supervised fine-tuning: a model learns, continues exactly, validates, and ends well on small files and signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.cli.main import main as cli
from penstock_tools.sft import training
from penstock_tools.sft.training import SupervisedRank

EXAMPLE = Path(__file__).parents[3] / "examples" / "arithmetic"
MODEL = EXAMPLE / "model"
PROMPTS = [f"{a}{b}+{b}{a}=" for a in range(1, 5) for b in range(5, 9)]


def ids(text: str) -> list[int]:
    return [3 + "0123456789+-*/=".index(character) for character in text]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def command(folder: Path, out: str, *words: str) -> list[str]:
    """The arguments of a fine-tuning that teaches a wrong answer instead of the sum."""
    data = write(folder / "data.parquet", [{"prompt": prompt, "response": prompt[0] * 2} for prompt in PROMPTS])
    config = folder / "run.yaml"
    config.write_text(
        f"model: {{path: {MODEL}}}\n"
        "learner: {lr: 3.0e-3, lr_schedule: cosine, micro_batch_tokens: 32, warmup_steps: 3}\n"
    )
    return ["sft", "--config", str(config), "--data", str(data), "--out", str(folder / out), *words]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def metrics(out: Path) -> list[dict[str, float]]:
    lines = (out.with_name(out.name + ".training") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return any(not torch.equal(weight, other[name]) for name, weight in one.items())


def answers_right(folder: Path) -> float:
    questions = torch.tensor([ids(prompt) for prompt in PROMPTS])
    with torch.no_grad():
        answers = AutoModelForCausalLM.from_pretrained(folder)(questions).logits[:, -1].argmax(-1)
    return float((answers == questions[:, 0]).float().mean())


@pytest.mark.long
def test_a_model_learns_the_answers_and_loads_again(tmp_path: Path) -> None:
    held_out = write(tmp_path / "held_out.parquet", [{"prompt": PROMPTS[0], "response": PROMPTS[0][0] * 2}])
    validation = ["--sft.validation.file", str(held_out), "--sft.validation.every_steps", "15"]
    words = command(tmp_path, "out", "--epochs", "20", "--batch-size", "8", *validation)
    assert cli(words) == 0
    assert answers_right(MODEL) < 0.5 and answers_right(tmp_path / "out") == 1.0
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    logged = metrics(tmp_path / "out")
    assert [line["step"] for line in logged] == list(range(41))
    assert logged[1]["train/loss"] > 10 * logged[-1]["train/loss"]
    validated = {line["step"]: line["val/loss"] for line in logged if "val/loss" in line}
    assert list(validated) == [0, 15, 30, 40] and validated[40] < validated[0] / 2
    assert cli(words) == 2, "an existing folder is never written over"


def test_the_validation_loss_is_the_mean_over_trained_tokens(tmp_path: Path) -> None:
    """It equals Hugging Face's own forward of each row alone. The rows differ in length, and share packed passes."""
    rows = [{"prompt": "1+2=", "response": "3"}, {"prompt": "25+31=", "response": "5678"}]
    held_out = write(tmp_path / "held_out.parquet", rows)
    words = command(tmp_path, "out", "--batch-size", "16", "--learner.warmup_steps", "0")
    assert cli([*words, "--sft.validation.file", str(held_out)]) == 0
    model, losses = AutoModelForCausalLM.from_pretrained(MODEL), []
    for row in rows:
        tokens = torch.tensor([*ids(row["prompt"] + row["response"]), 1])
        with torch.no_grad():
            log_probs = model(tokens[None]).logits[0].log_softmax(-1)
        first = len(row["prompt"])
        losses += [-float(log_probs[place - 1, tokens[place]]) for place in range(first, len(tokens))]
    assert metrics(tmp_path / "out")[0]["val/loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.long
def test_packed_rows_train_as_rows_alone(tmp_path: Path) -> None:
    """A pass of 16 tokens has one row, and a pass of 16384 has all of them."""
    ends = []
    for tokens in ("16", "16384"):
        words = command(tmp_path, f"out-{tokens}", "--batch-size", "4")
        assert cli([*words, "--learner.micro_batch_tokens", tokens]) == 0
        ends.append(weights(tmp_path / f"out-{tokens}"))
    for name, weight in ends[0].items():
        torch.testing.assert_close(ends[1][name], weight, atol=2e-4, rtol=1e-3)
    changed = [(ends[0][name] - weight).abs().max() for name, weight in weights(MODEL).items()]
    assert min(changed) > 1e-3, "a step changes every weight by more than the tolerance"


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM to this process in the middle of a step."""
    own = SupervisedRank.step

    def signalled(self: SupervisedRank, batch: Any, num_done: int) -> dict[str, float]:
        if num_done + 1 == step:
            signal.raise_signal(signal.SIGTERM)
        return own(self, batch, num_done)

    monkeypatch.setattr(training.SupervisedRank, "step", signalled)


@pytest.mark.parametrize(
    ("num_epochs", "lora"),
    [(2, ("--learner.lora", "{rank: 2, alpha: 4}")), pytest.param(3, (), marks=pytest.mark.long)],
)
def test_a_training_that_is_stopped_ends_with_the_weights_of_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], num_epochs: int,
    lora: tuple[str, ...],
) -> None:  # fmt: skip
    """The signal comes in the second epoch. The batches of an epoch do not divide its rows."""
    settings = ("--epochs", str(num_epochs), "--batch-size", "6", *lora)
    assert cli(command(tmp_path, "whole", *settings)) == 0
    words = command(tmp_path, "stopped", *settings)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert cli(words) == 130
    assert signal.getsignal(signal.SIGTERM) is before
    assert "stopped after step 5; the same command continues from" in capsys.readouterr().out
    assert not (tmp_path / "stopped").exists()
    assert cli([*words, "--seed", "2"]) == 2
    assert "was trained with other rows, masks, order or batch size" in capsys.readouterr().err
    assert cli(words) == 0
    assert not differ(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))
    assert differ(weights(tmp_path / "whole"), weights(MODEL))
    losses = [[line["train/loss"] for line in metrics(tmp_path / out)] for out in ("whole", "stopped")]
    assert len(losses[0]) == 3 * num_epochs and losses[0] == losses[1]


@pytest.mark.long
def test_an_adapter_is_written_alone_or_merged(tmp_path: Path) -> None:
    import peft

    settings = ("--batch-size", "8", "--epochs", "2", "--learner.lora", "{rank: 4, alpha: 8}")
    assert cli(command(tmp_path, "merged", *settings)) == 0
    assert cli(command(tmp_path, "adapter", *settings, "--sft.output", "adapter")) == 0
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    questions = torch.tensor([ids(prompt) for prompt in PROMPTS])
    with torch.no_grad():
        untrained = base(questions).logits
        adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(questions).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(questions).logits
    torch.testing.assert_close(adapted, merged, atol=1e-4, rtol=1e-4)
    assert (merged - untrained).abs().max() > 0.1


@pytest.mark.long
def test_files_with_weights_make_the_epoch_that_they_say(tmp_path: Path) -> None:
    other = write(tmp_path / "other.parquet", [{"prompt": "9+9=", "response": "18"}])
    words = command(tmp_path, "out", "--batch-size", "4", "--learner.warmup_steps", "0")
    files = f"[{tmp_path}/data.par*, {{file: {other}, weight: 4}}]"
    assert cli([*words, "--sft.file", files]) == 0
    assert len(metrics(tmp_path / "out")) == 5, "20 rows of an epoch"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "8"], "gives 2 steps, which are not more than learner.warmup_steps (3); lower it"),
        (["--batch-size", "17", "--sft.last_batch", "drop"], "has 16 rows, less than one batch of 17; lower"),
        (["--sft.validation.file", "absent.parquet"], "dataset absent.parquet does not exist"),
        (["--sft.epochs", "0"], "sft.epochs: must be at least 1, not 0"),
        (["--epochs", "0"], "--epochs: must be at least 1, not 0"),
        (["--learner.sequence_parallel", "2"], "policy.num_ranks, which torchrun sets for sft, must be a multiple of"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert cli(command(tmp_path, "out", *words)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_the_repositorys_own_config_takes_a_file_of_three_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "small.parquet", [{"prompt": prompt, "response": "1"} for prompt in PROMPTS[:3]])
    paths = ["--config", str(EXAMPLE / "sft.yaml"), "--data", str(data), "--model.path", str(MODEL)]
    words = ["sft", *paths, "--out", str(tmp_path / "out")]
    assert cli(words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "gives 1 steps, which are not more than learner.warmup_steps (50)" in line
    assert cli([*words, "--learner.warmup_steps", "0"]) == 0
    assert differ(weights(tmp_path / "out"), weights(MODEL))


@pytest.mark.long
def test_two_ranks_of_torchrun_take_the_steps_of_one(tmp_path: Path) -> None:
    """16 rows do not divide into batches of 6, and the parts of two ranks differ in length. Or the ranks share them."""
    losses, ends = [], []
    for num_ranks, num_sharing in ((1, 1), (2, 1), (2, 2)):
        out = f"out-{num_ranks}-{num_sharing}"
        words = command(tmp_path, out, "--epochs", "2", "--batch-size", "6", "--learner.checkpoint.every_steps", "4")
        words += ["--learner.sequence_parallel", str(num_sharing)]
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        run = subprocess.run(
            [sys.executable, *torchrun, "-m", "penstock.cli.main", *words],
            capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-3000:]
        losses.append([line["train/loss"] for line in metrics(tmp_path / out)])
        ends.append(weights(tmp_path / out))
    assert len(losses[0]) == 6 and losses[0][0] > 2 * losses[0][-1]
    for other in (1, 2):
        assert losses[other] == pytest.approx(losses[0], abs=2e-4)
        for name, weight in ends[0].items():
            torch.testing.assert_close(ends[other][name], weight, atol=2e-4, rtol=1e-3)
    changed = [(ends[0][name] - weight).abs().max() for name, weight in weights(MODEL).items()]
    assert min(changed) > 1e-3, "the steps change every weight by more than the tolerance"
    checkpoints = tmp_path / "out-2-1.training" / "checkpoints"
    assert sorted(path.name[-1] for path in checkpoints.iterdir()) == ["4", "6"]
