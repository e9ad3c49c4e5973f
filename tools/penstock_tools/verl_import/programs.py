"""Translates verl's generation, evaluation and supervised training to a config and the command that uses it."""

from __future__ import annotations

import shlex

from penstock_tools.verl_import.convert import files, listed, local_path
from penstock_tools.verl_import.keys import Values
from penstock_tools.verl_import.run import number, set_lora, set_warmup, steps_of_files

CONFIG = "CONFIG"
"""The word of a command that stands for the file with the config."""


def set_generation(values: Values) -> list[str]:
    """Set the model and the engine. Returns the words of `penstock generate` without the config."""
    values.set_direct()
    values.set("run", "verl-generation")
    prompt, response = int(values.get("rollout.prompt_length")), int(values.get("rollout.response_length"))
    values.set("rollout.engine.max_model_len", int(values.get("rollout.max_model_len") or prompt + response))
    values.set("rollout.reward.compat", "verl")
    words = [
        "penstock", "generate", str(files(values.get("data.path"))), "--config", CONFIG,
        "--output", local_path(values.get("data.output_path")),
        "--n", str(values.get("data.n_samples")), "--temperature", str(values.get("rollout.temperature")),
        "--top-p", str(values.get("rollout.top_p")), "--top-k", str(max(0, int(values.get("rollout.top_k")))),
        "--max-tokens", str(response),
    ]  # fmt: skip
    return [*words, *["--ignore-eos"] * bool(values.get("rollout.ignore_eos"))]


def set_evaluation(values: Values) -> list[str]:
    """Set the rewards. Returns the words of `penstock evaluate` without the config."""
    values.set_direct(*["custom_reward_function."] * (not values.is_given("custom_reward_function.path")))
    values.set("run", "verl-evaluation")
    values.set("model.path", "not-used")
    values.set("rollout.reward.compat", "verl")
    file = str(files(values.get("data.path")))
    return ["penstock", "evaluate", file, "--config", CONFIG, "--response-column", str(values.get("data.response_key"))]


def command_line(words: list[str], config: str) -> str:
    return shlex.join([config if word == CONFIG else word for word in words])


def set_sft(values: Values) -> list[str]:
    """Set the model, the files and the learner. Returns the words of `penstock sft` without the config."""
    is_plain = values.program == "fsdp_sft" and not values.get("data.multiturn.enable")
    used = {
        "data.multiturn.": not is_plain,
        "trainer.test_freq": values.is_given("data.val_files"),
        "trainer.project_name": "wandb" in listed(values.get("trainer.logger")),
    }
    values.set_direct(*(prefix for prefix, is_used in used.items() if not is_used))
    values.set("model.dtype", "bfloat16")
    values.set("sft.last_batch", "drop")
    if is_plain:  # a question as the user's message, and an answer
        for column in ("prompt", "response"):
            values.set(f"sft.columns.{column}", _nested(values, column))
        values.set("sft.text_prompts", "user")
    set_warmup(values, "optim.", steps_of_files(values), int(values.get("optim.lr_warmup_steps")) < 0)
    longest, rows = int(values.get("data.max_length")), int(values.get("data.micro_batch_size_per_gpu"))
    tokens = int(values.get("data.max_token_len_per_gpu")) if values.get("data.use_dynamic_bsz") else rows * longest
    values.set("learner.micro_batch_tokens", tokens)
    set_lora(values, "model.")
    num_sharing = int(values.get("engine.ulysses_sequence_parallel_size") or 1)
    num_ranks = max(number(values.get("trainer.n_gpus_per_node"), 8), num_sharing)
    num_ranks -= num_ranks % num_sharing
    values.set("learner.sequence_parallel", num_sharing)
    values.set("learner.policy.num_ranks", num_ranks)
    values.findings.notes.append("the command takes the ranks from the config; torchrun's own number may be another")
    out = local_path(values.get("trainer.default_local_dir") or "models/sft")
    torchrun = ["torchrun", "--nproc-per-node", str(num_ranks), "-m", "penstock.cli.main"]
    return [*torchrun, "sft", "--config", CONFIG, "--out", out]


def _nested(values: Values, column: str) -> str:
    keys = values.get(f"data.{column}_dict_keys") or []
    if len(keys) > 1:
        values.lose(f"data.{column}_dict_keys", "a field of a column may not be nested deeper")
    return ".".join([str(values.get(f"data.{column}_key")), *map(str, keys[:1])])
