"""The task of the whole runs: a random Qwen2, its tokenizer, the prompts and the reward, the same for every contender.

    PYTHONPATH=bench/gpu python -m whole_run_parts.task MODEL FOLDER

The tokenizer is a byte-level BPE without merges, so a prompt has as many tokens as letters. `AutoTokenizer` reads it as
Qwen2's own. A response is as long as the limit: the engines ignore the end token.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner_parts.models import SHAPES

PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DATA_SOURCE = "penstock/vowels"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's own pattern. Transformers puts it in place of any other."""


@dataclass(frozen=True)
class Task:
    """The sizes of a run. A step trains on `num_prompts` groups."""

    model: str
    num_prompts: int = 32
    num_samples: int = 8
    prompt_tokens: int = 128
    response_tokens: int = 256
    num_steps: int = 15
    num_warm: int = 3
    """First steps that are in no figure."""
    lr: float = 1e-6

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_samples

    @property
    def max_tokens(self) -> int:
        """The longest sequence."""
        return self.prompt_tokens + self.response_tokens

    def prompts(self) -> list[str]:
        """Enough prompts for every step and for the groups that are generated ahead."""
        dice = random.Random(7)
        count = self.num_prompts * (self.num_steps + 8)
        return ["".join(dice.choices(LETTERS, k=self.prompt_tokens)) for _ in range(count)]


def rows_of(task: Task) -> list[dict[str, Any]]:
    """The prompts with verl's columns."""
    return [
        {"prompt": [{"role": "user", "content": text}], "data_source": DATA_SOURCE,
         "reward_model": {"ground_truth": ""}}
        for text in task.prompts()
    ]  # fmt: skip


def write_prompts(path: Path, task: Task) -> None:
    """The prompts as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of(task)))


def write_model(folder: Path, name: str) -> None:
    """Write the model with random weights in bfloat16 (float32 for `tiny`, which is tried on CPUs)."""
    import torch
    from transformers import AutoModelForCausalLM

    shape = SHAPES[name]
    config = shape.config()
    config.bos_token_id, config.eos_token_id, config.pad_token_id = None, EOS_ID, PAD_ID
    torch.manual_seed(0)
    dtype = torch.float32 if name == "tiny" else torch.bfloat16
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS_ID, PAD_ID
    model.save_pretrained(folder)
    write_tokenizer(folder, shape.vocabulary)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Three special tokens, one token for each byte, and names of letters and digits for the rest."""
    from tokenizers.pre_tokenizers import ByteLevel

    names = ["<pad>", "<eos>", "<unk>", *sorted(ByteLevel.alphabet())]
    dice = random.Random(3)
    names += [f"{''.join(dice.choices(LETTERS, k=3))}{index}" for index in range(len(names), vocabulary)]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False}
    described: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": index, "content": names[index], **special} for index in (PAD_ID, EOS_ID, UNKNOWN_ID)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_only]},
        "post_processor": None,
        "decoder": bytes_only,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {name: index for index, name in enumerate(names)}, "merges": [],
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(described))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<eos>", "pad_token": "<pad>",
        "unk_token": "<unk>", "padding_side": "left", "model_max_length": 32768,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


if __name__ == "__main__":
    write_model(Path(sys.argv[2]), sys.argv[1])
