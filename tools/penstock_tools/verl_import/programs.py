"""Translates verl's generation, evaluation and supervised training to a config and the command that uses it."""

from __future__ import annotations

import shlex
from typing import Any

from penstock_tools.verl_import.keys import Values, local_path
from penstock_tools.verl_import.run import (
    ENGINES,
    dtype,
    files,
    lr_schedule,
    num_rows,
    run_name,
    set_loggers,
    set_lora,
    set_reward_function,
)

CONFIG = "CONFIG"
"""The word of a command that stands for the file with the config."""


def set_generation(values: Values) -> list[str]:
    """Set the model and the engine. Returns the words of `penstock generate` without the config."""
    prompt, response = int(values.get("rollout.prompt_length")), int(values.get("rollout.response_length"))
    values.set("run", "verl-generation")
    values.set("model.path", local_path(values.get("model.path")))
    values.set("model.dtype", dtype(values.get("rollout.dtype")))
    values.set("dataset.columns.prompt", values.get("data.prompt_key"))
    name = str(values.get("rollout.name"))
    values.set("rollout.engine.name", ENGINES.get(name, "auto"))
    values.set("rollout.engine.max_model_len", int(values.get("rollout.max_model_len") or prompt + response))
    for ours, key in (
        ("max_num_seqs", "max_num_seqs"), ("tensor_parallel_size", "tensor_model_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"), ("enforce_eager", "enforce_eager"),
    ):  # fmt: skip
        values.set(f"rollout.engine.{ours}", values.get(f"rollout.{key}"))
    values.set("rollout.prompt.max_tokens", prompt)
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
    values.set("run", "verl-evaluation")
    values.set("model.path", "not-used")
    values.set("dataset.columns.data_source", values.get("data.data_source_key"))
    values.set("dataset.columns.ground_truth", f"{values.get('data.reward_model_key')}.ground_truth")
    values.set("rollout.reward.compat", "verl")
    set_reward_function(values)
    file = str(files(values.get("data.path")))
    return ["penstock", "evaluate", file, "--config", CONFIG, "--response-column", str(values.get("data.response_key"))]


def command_line(words: list[str], config: str) -> str:
    return shlex.join([config if word == CONFIG else word for word in words])


# ── supervised training ──

_TOO_LONG = {"error": "error", "right": "cut"}


def set_sft(values: Values) -> list[str]:
    """Set the model, the files and the learner. Returns the words of `penstock sft` without the config."""
    values.set("run", run_name(values))
    values.set("model.path", local_path(values.get("model.path")))
    values.set("model.dtype", "bfloat16")
    _set_files(values)
    _set_columns(values)
    values.set_direct()
    _set_schedule(values)
    longest, rows = int(values.get("data.max_length")), int(values.get("data.micro_batch_size_per_gpu"))
    tokens = int(values.get("data.max_token_len_per_gpu")) if values.get("data.use_dynamic_bsz") else rows * longest
    values.set("learner.micro_batch_tokens", tokens)
    values.set("learner.activation_checkpointing", 1.0 if values.get("model.enable_gradient_checkpointing") else 0.0)
    if int(values.get("model.lora_rank") or 0) > 0:
        set_lora(values, "model.")
    else:
        values.ignore("model.lora", "model.target_modules")
    _set_output(values)
    return _command(values)


def _set_files(values: Values) -> None:
    values.set("sft.file", files(values.get("data.train_files")))
    values.set("sft.batch_size", int(values.get("data.train_batch_size")))
    values.set("sft.epochs", int(values.get("trainer.total_epochs")))
    values.set("sft.last_batch", "drop")
    values.set("sft.max_tokens", int(values.get("data.max_length")))
    side = str(values.get("data.truncation"))
    values.set("sft.too_long", _TOO_LONG.get(side, "drop"))
    if side not in _TOO_LONG:
        values.lose("data.truncation", "rows that are too long are left out: only their end can be cut (right)")
    if values.is_given("data.val_files"):
        values.set("sft.validation.file", files(values.get("data.val_files")))
        if int(values.get("trainer.test_freq")) > 0:
            values.set("sft.validation.every_steps", int(values.get("trainer.test_freq")))


def _set_columns(values: Values) -> None:
    """Conversations, or as the older trainer by default, a question as the user's message and an answer."""
    prefix = "data.multiturn." if values.program == "fsdp_sft" else "data."
    if values.program == "fsdp_sft" and not values.get("data.multiturn.enable"):
        for column in ("prompt", "response"):
            values.set(f"sft.columns.{column}", _nested(values, column))
        values.set("sft.text_prompts", "user")
    else:
        values.set("sft.columns.messages", values.get(prefix + "messages_key"))
        values.set("sft.columns.tools", values.get(prefix + "tools_key"))
    if arguments := values.below("data.apply_chat_template_kwargs"):
        values.set("rollout.prompt.template_arguments", arguments)


def _nested(values: Values, column: str) -> str:
    keys: Any = values.get(f"data.{column}_dict_keys") or []
    if len(keys) > 1:
        values.lose(f"data.{column}_dict_keys", "a field of a column may not be nested deeper")
    return ".".join([str(values.get(f"data.{column}_key")), *map(str, keys[:1])])


def _set_schedule(values: Values) -> None:
    ratio_key = "optim.lr_warmup_steps_ratio"
    warmup, ratio = int(values.get("optim.lr_warmup_steps")), float(values.get(ratio_key))
    if warmup < 0 and ratio > 0:
        paths = files(values.get("data.train_files"))
        rows = num_rows(paths if isinstance(paths, list) else [paths])
        if rows is None:
            values.lose(ratio_key, "the files are not here: set learner.warmup_steps to this share of the steps")
            if not values.is_given(ratio_key):
                values.findings.notes.append(
                    f"verl warms up for {ratio} of the steps, which are not known here: set learner.warmup_steps"
                )
        batch = int(values.get("data.train_batch_size"))
        warmup = int(ratio * int(values.get("trainer.total_epochs")) * ((rows or 0) // batch))
    values.set("learner.warmup_steps", max(0, warmup))
    values.set("learner.lr_schedule", lr_schedule(values, "optim.lr_scheduler_type"))


def _set_output(values: Values) -> None:
    if int(values.get("trainer.save_freq")) > 0:
        values.set("learner.checkpoint.every_steps", int(values.get("trainer.save_freq")))
    if values.get("trainer.max_ckpt_to_keep"):
        values.set("learner.checkpoint.keep", int(values.get("trainer.max_ckpt_to_keep")))
    values.set("learner.checkpoint.resume", "off" if values.get("trainer.resume_mode") == "disable" else "auto")
    set_loggers(values)


def _command(values: Values) -> list[str]:
    num_sharing = int(values.get("engine.ulysses_sequence_parallel_size") or 1)
    given = values.get("trainer.n_gpus_per_node")
    num_ranks = max(int(given) if str(given).isdigit() else 8, num_sharing)
    values.set("learner.sequence_parallel", num_sharing)
    values.set("learner.policy.num_ranks", num_ranks - num_ranks % num_sharing)
    out = local_path(values.get("trainer.default_local_dir") or "models/sft")
    values.findings.notes.append("the command takes the ranks from the config; torchrun's own number may be another")
    torchrun = ["torchrun", "--nproc-per-node", str(num_ranks - num_ranks % num_sharing), "-m", "penstock.cli.main"]
    return [*torchrun, "sft", "--config", CONFIG, "--out", out]
