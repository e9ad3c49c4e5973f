"""Make a tiny version of a recipe, which runs on a CPU in half a minute: a random model, a few rows, two steps.

    python -m examples.recipes.tiny gsm8k --out tiny/gsm8k
    penstock up tiny/gsm8k/tiny.yaml

The run has the recipe's own algorithm, rewards, tools and data preparation. Only sizes are changed. A random model
learns nothing: this shows that every part of a recipe works, before you spend GPUs on it.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from examples.recipes.tiny_sources import COPIES, NUM_HELD_OUT, NUM_ROWS, write_tiny_copies
from penstock.config.loading import read_config

HERE = Path(__file__).parent
DATA_OF = {"lora_one_gpu": "gsm8k"}
"""Recipes that use the data of another one."""
MAX_TOKENS = 16
CONTEXT = 4096
POSITIONS = 32768
"""Longest sequence of the tiny model, so that the lengths of the real configs can be checked with it."""
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(folder: Path) -> None:
    """A Qwen2 with random weights and one token for each byte."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: index for index, token in enumerate([*special, *sorted(ByteLevel.alphabet())])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=[], pad_token=special[0], eos_token=special[2], unk_token=None, chat_template=TEMPLATE,
        additional_special_tokens=special[1:], model_max_length=POSITIONS,
    )  # fmt: skip
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=POSITIONS, tie_word_embeddings=True, dtype="float32",
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def prepare(recipe: str, folder: Path) -> None:
    """Write tiny copies of the datasets, and let the recipe's own prepare.py read them."""
    copies, data = folder / "copies", DATA_OF.get(recipe, recipe)
    write_tiny_copies(recipe, copies)
    words = ["--from", str(copies), "--out", str(folder), "--limit", str(2 * (NUM_ROWS + NUM_HELD_OUT))]
    importlib.import_module(f"examples.recipes.{data}.prepare").main(words)


def shrink(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe's config with the tiny model and data, small sizes, and no GPUs."""
    dataset, rollout, learner = config["dataset"], config["rollout"], config["learner"]
    config["run_dir"] = str(folder / "runs")
    config["model"] = {"path": str(folder / "model"), "dtype": "float32"}
    validation = dataset["validation"] | {"every_steps": 2, "max_tokens": MAX_TOKENS}
    validation |= {"num_samples": 2, "temperature": 1.0}
    validation["file"] = str(folder / Path(validation["file"]).name)
    dataset |= {"file": str(folder / "train.parquet"), "max_tokens": MAX_TOKENS, "validation": validation}
    dataset["num_samples"] = min(2, dataset.get("num_samples", 2))
    # A random model has the same reward for every sample, and dynamic sampling would wait for others forever.
    config["replay"] = {"groups_per_step": 4, "max_staleness": 1, "dynamic_sampling": False}
    rollout |= {"num_servers": 1, "max_concurrent_groups": 4}
    rollout["engine"] = {"name": "torch", "max_model_len": CONTEXT, "max_num_seqs": 16}
    rollout.pop("prompt", None)
    for tool in rollout.get("agents", {}).get("tools", {}).values():
        if "index" in tool:
            tool["index"] = str(folder / "copies" / "wiki.jsonl")
    for role in ("policy", "reference", "critic"):
        if role in learner:
            learner[role] |= {"num_ranks": 1, "gpus_per_rank": 0}
    learner |= {"num_steps": 2, "micro_batch_tokens": CONTEXT, "compile": False, "minibatches_per_step": 1}
    learner |= {
        "sequence_parallel": 1,
        "loggers": ["jsonl"],
        "checkpoint": {"every_steps": 2},
        "master_dtype": "float32",
    }
    if "overlong" in learner["algorithm"]:
        learner["algorithm"]["overlong"] = {"max_num_tokens": MAX_TOKENS, "buffer_num_tokens": 4}
    return config


def make_tiny(recipe: str, config: Path, folder: Path) -> Path:
    """Write a tiny version of a config into a folder. Returns its YAML file."""
    folder.mkdir(parents=True, exist_ok=True)
    prepare(recipe, folder)
    if not (folder / "model").exists():
        make_model(folder / "model")
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(shrink(read_config(config), folder), sort_keys=False))
    return file


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("recipe", choices=sorted(COPIES))
    parser.add_argument("--config", help="name of the config in the recipe's folder (default: the first one)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args(argv)
    configs = sorted((HERE / args.recipe).glob("*.yaml"))
    chosen = HERE / args.recipe / args.config if args.config else configs[0]
    if chosen not in configs:
        parser.error(f"--config {args.config} is not one of {', '.join(file.name for file in configs)}")
    print(f"penstock up {make_tiny(args.recipe, chosen, args.out)}")


if __name__ == "__main__":
    main()
