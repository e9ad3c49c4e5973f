"""Translates verl's generation and evaluation programs to a config and the command that uses it."""

from __future__ import annotations

import shlex

from penstock_tools.verl_import.rollout import ENGINES
from penstock_tools.verl_import.run import dtype, files
from penstock_tools.verl_import.values import Values, local_path

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
    if values.is_given("custom_reward_function.path"):
        values.set("rollout.reward.function_file", local_path(values.get("custom_reward_function.path")))
        values.set("rollout.reward.function_name", values.get("custom_reward_function.name"))
        if arguments := values.below("custom_reward_function.reward_kwargs"):
            values.set("rollout.reward.function_kwargs", arguments)
    file = str(files(values.get("data.path")))
    return ["penstock", "evaluate", file, "--config", CONFIG, "--response-column", str(values.get("data.response_key"))]


def command_line(words: list[str], config: str) -> str:
    return shlex.join([config if word == CONFIG else word for word in words])
