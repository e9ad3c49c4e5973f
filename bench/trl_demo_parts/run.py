"""Trains the demo's task with TRL's GRPOTrainer. Runs in TRL's own environment, so it imports nothing of ours.

python bench/trl_demo_parts/run.py '{"seed": 1, "num_steps": 50, "lr": 2e-4, "keep_every": 5, "folder": "/tmp/trl"}'
"""

from __future__ import annotations

import json
import random
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 32, 8, 8
SHUFFLES = 20
"""More epochs than any run needs."""

compute_score = runpy.run_path(str(ARITHMETIC / "reward.py"))["compute_score"]


def exact_answer(completions: list[str], truth: list[str], **_: Any) -> list[float]:
    return [compute_score("", text, wanted) for text, wanted in zip(completions, truth, strict=True)]


def prompts(tokenizer: Any, seed: int) -> list[dict[str, str]]:
    """The prompts in the order in which our run submits them."""
    rows = parquet.read_table(ARITHMETIC / "train.parquet").to_pylist()
    order = random.Random(seed)
    found = []
    for _ in range(SHUFFLES):
        order.shuffle(rows)
        found += [
            {
                "prompt": tokenizer.apply_chat_template(row["prompt"], tokenize=False),
                "truth": row["reward_model"]["ground_truth"],
            }
            for row in rows
        ]
    return found


class KeptWeights(TrainerCallback):  # type: ignore[misc]
    """Keeps the weights of every few steps, and the end of each step without the time that this takes."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every
        self.started = self.saving_s = 0.0
        self.ended_s: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._keep(given["model"], 0)
        self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        now = time.perf_counter()
        self.ended_s.append(round(now - self.started - self.saving_s, 3))
        if state.global_step % self.every == 0:
            self._keep(given["model"], state.global_step)
            self.saving_s += time.perf_counter() - now

    def _keep(self, model: Any, step: int) -> None:
        model.save_pretrained(self.folder / f"version-{step:08d}")


def main(given: dict[str, Any]) -> None:
    folder = Path(given["folder"])
    tokenizer: Any = AutoTokenizer.from_pretrained(ARITHMETIC / "model")
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        epsilon_high=0.28,
        max_steps=given["num_steps"],
        learning_rate=given["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=5,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        shuffle_dataset=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        seed=given["seed"],
    )
    kept = KeptWeights(folder / "snapshots", given["keep_every"])
    trainer: Any = GRPOTrainer(
        model=str(ARITHMETIC / "model"),
        reward_funcs=exact_answer,
        args=settings,
        train_dataset=Dataset.from_list(prompts(tokenizer, given["seed"])),
        processing_class=tokenizer,
        callbacks=[kept],
    )
    trainer.train()
    (folder / "result.json").write_text(json.dumps({"ended_s": kept.ended_s}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
