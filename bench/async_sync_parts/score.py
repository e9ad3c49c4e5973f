"""Scores the weights that a learner kept while it trained, on the held-out sums of examples/arithmetic."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"
NUM_SAMPLES = 4
MAX_TOKENS = 8


def score_snapshots(folder: Path) -> list[tuple[int, float]]:
    """(version, score) of every snapshot, in the order of versions. A version is the number of its step."""
    return [(int(path.name.removeprefix("version-")), score(path)) for path in sorted(folder.glob("version-*"))]


def score(model_folder: Path) -> float:
    """The mean reward of samples at temperature 1. Every call draws with the same seed, so that scores differ by the
    policy."""
    import pyarrow.parquet as parquet
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    compute_score = runpy.run_path(str(ARITHMETIC / "reward.py"))["compute_score"]
    rows = parquet.read_table(ARITHMETIC / "heldout.parquet").to_pylist()
    tokenizer: Any = AutoTokenizer.from_pretrained(ARITHMETIC / "model")
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False) for row in rows for _ in range(NUM_SAMPLES)]
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    with torch.inference_mode():
        answered = model.generate(
            **given, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=MAX_TOKENS,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    answers = tokenizer.batch_decode(answered[:, given["input_ids"].shape[1] :])
    truths = [row["reward_model"]["ground_truth"] for row in rows for _ in range(NUM_SAMPLES)]
    rewards: list[float] = [compute_score("", answer, truth) for answer, truth in zip(answers, truths, strict=True)]
    return sum(rewards) / len(rewards)
