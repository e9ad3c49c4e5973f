"""Translates a verl training run to our configuration, section by section."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from penstock.config.learner import CheckpointConfig
from penstock_tools.verl_import.algorithm import has_critic, set_algorithm
from penstock_tools.verl_import.gpus import divide
from penstock_tools.verl_import.rewards import set_rewards
from penstock_tools.verl_import.rollout import set_rollout
from penstock_tools.verl_import.values import Values, local_path

_ACTOR = "actor_rollout_ref.actor."
_OPTIM = "actor_rollout_ref.actor.optim."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "half": "float16", "auto": "bfloat16"}
_LOGGERS = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}
_NEVER = 1_000_000
"""Steps between validations of a run that verl validates before training only."""


def set_run(values: Values, max_staleness: int) -> None:
    max_prompt = int(values.get("data.max_prompt_length"))
    max_response = int(values.get("data.max_response_length"))
    num_steps = _num_steps(values)
    values.set("run", run_name(values))
    if values.get("trainer.default_local_dir"):
        values.set("run_dir", local_path(values.get("trainer.default_local_dir")))
    values.set("model.path", local_path(values.get(_MODEL + "path")))
    values.set("model.dtype", dtype(values.get(_ROLLOUT + "dtype")))
    _set_dataset(values, max_response)
    _set_validation(values, max_response)
    _set_replay(values, max_staleness)
    set_rollout(values, max_prompt, max_response)
    set_rewards(values, max_response)
    _set_learner(values, num_steps)
    set_algorithm(values, max_staleness, max_response)
    _set_batches(values, max_prompt + max_response)
    _set_gpus(values)
    _set_output(values)


def run_name(values: Values) -> str:
    name = re.sub(r"[^a-z0-9_-]+", "-", str(values.get("trainer.experiment_name")).lower()).strip("-_")[:63]
    return name or "verl-run"


def dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    return _DTYPES.get(name, name if name in _DTYPES.values() else "bfloat16")


def files(value: Any) -> Any:
    found = [local_path(entry) for entry in (value if isinstance(value, list) else [value])]
    return found[0] if len(found) == 1 else found


def _num_steps(values: Values) -> int | None:
    """The steps of the run: given, or computed from the rows of the files where they are on this machine."""
    given = values.get("trainer.total_training_steps")
    if given:
        return int(given)
    paths = files(values.get("data.train_files"))
    rows = num_rows(paths if isinstance(paths, list) else [paths])
    epochs = values.get("trainer.total_epochs")
    return None if rows is None else int(epochs) * (rows // int(values.get("data.train_batch_size"))) or None


def num_rows(paths: list[str]) -> int | None:
    if not all(path.endswith(".parquet") and Path(path).is_file() for path in paths):
        return None
    from pyarrow import parquet

    return sum(int(parquet.ParquetFile(path).metadata.num_rows) for path in paths)


def _set_dataset(values: Values, max_response: int) -> None:
    values.set("dataset.file", files(values.get("data.train_files")))
    values.set_direct(
        prefixes=("data.", _ROLLOUT + "n", _ROLLOUT + "temperature", _ROLLOUT + "top_", _ROLLOUT + "ignore_eos")
    )
    values.set("dataset.epochs", values.get("trainer.total_epochs"))
    values.set("dataset.last_batch", "drop")
    values.set("dataset.max_tokens", int(values.get(_ROLLOUT + "response_length") or max_response))
    if values.is_given("data.seed"):
        values.set("dataset.shuffle_seed", int(values.get("data.seed")))
    if float(values.get(_ROLLOUT + "temperature")) <= 0:
        values.set("dataset.temperature", 1.0)
        values.lose(_ROLLOUT + "temperature", "training needs samples: 1.0 is used")


def _set_validation(values: Values, max_response: int) -> None:
    ours, frequency = "dataset.validation.", int(values.get("trainer.test_freq"))
    is_before, is_only = values.get("trainer.val_before_train"), values.get("trainer.val_only")
    paths = values.get("data.val_files")
    if not paths or not (frequency > 0 or is_before or is_only):
        values.lose("data.val_files", "the run never validates: test_freq and val_before_train are off")
        return
    values.set(ours + "file", files(paths))
    values.set(ours + "every_steps", frequency if frequency > 0 else _NEVER)
    values.set(ours + "before_train", bool(is_before))
    if is_only:
        values.set(ours + "only", True)
    values.set_direct(prefixes=(_ROLLOUT + "val_kwargs.",))
    is_sampled = values.get(_ROLLOUT + "val_kwargs.do_sample")
    values.set(ours + "temperature", float(values.get(_ROLLOUT + "val_kwargs.temperature")) if is_sampled else 0.0)
    values.set(ours + "max_tokens", max_response)


def _set_replay(values: Values, max_staleness: int) -> None:
    values.set("replay.groups_per_step", int(values.get("data.train_batch_size")))
    values.set("replay.max_staleness", max_staleness)
    if max_staleness == 0:
        values.set("replay.stale_policy", "wait")
    if values.get("algorithm.filter_groups.enable"):
        values.set("replay.dynamic_sampling", True)


def _set_learner(values: Values, num_steps: int | None) -> None:
    given_steps = values.get("trainer.total_training_steps")
    if given_steps:
        values.set("learner.num_steps", int(given_steps))
    values.set_direct(
        prefixes=(
            _OPTIM,
            _ACTOR + "grad_clip",
            _ACTOR + "ppo_epochs",
            _ACTOR + "shuffle",
            _ACTOR + "data_loader_seed",
            _MODEL + "enable_gradient_checkpointing",
        )  # fmt: skip
    )
    _set_schedule(values, num_steps)
    if dtype(values.get(_ACTOR + "fsdp_config.model_dtype")) == "bfloat16":
        values.set("learner.master_dtype", "bfloat16")
    if values.get(_ACTOR + "fsdp_config.offload_policy"):
        values.set("learner.cpu_offload", True)
    if int(values.get(_MODEL + "lora_rank") or 0) > 0:
        set_lora(values, _MODEL)
    else:
        values.ignore(_MODEL + "lora", _MODEL + "target_modules", _MODEL + "exclude_modules")
    if values.is_given("actor_rollout_ref.ref.model.path"):
        values.set("learner.reference.path", local_path(values.get("actor_rollout_ref.ref.model.path")))
    if values.is_given("actor_rollout_ref.nccl_timeout"):
        values.set("learner.rank_timeout_s", float(values.get("actor_rollout_ref.nccl_timeout")))
    if has_critic(values):
        values.set_direct(prefixes=("critic.optim.lr",))
        path = local_path(values.get("critic.model.path"))
        if values.is_given("critic.model.path") and path != values.fields["model"]["path"]:
            values.set("learner.critic.path", path)
        if values.get("trainer.critic_warmup"):
            values.set("learner.critic_warmup_steps", int(values.get("trainer.critic_warmup")))
    else:
        values.ignore("critic.")


def _set_schedule(values: Values, num_steps: int | None) -> None:
    key, ratio_key = _OPTIM + "lr_scheduler_type", _OPTIM + "lr_warmup_steps_ratio"
    warmup, ratio = int(values.get(_OPTIM + "lr_warmup_steps")), float(values.get(ratio_key))
    if warmup <= 0 and ratio > 0:
        if num_steps is None:
            values.lose(
                ratio_key, "the steps of the run are not known here: set learner.warmup_steps to this share of them"
            )
        warmup = int(ratio * (num_steps or 0))
    values.set("learner.warmup_steps", max(0, warmup))
    schedule = str(values.get(key))
    if schedule not in ("constant", "linear", "cosine"):
        values.lose(key, "replaced by constant; schedules are constant, linear and cosine")
        schedule = "constant"
    if schedule != "constant" and num_steps is None:
        values.lose(key, f"set learner.num_steps, where the schedule ends, and learner.lr_schedule: {schedule}")
        schedule = "constant"
    elif schedule != "constant":
        values.set("learner.num_steps", num_steps)
    values.set("learner.lr_schedule", schedule)


def set_lora(values: Values, model: str) -> None:
    """Set the adapter from the keys below `model`."""
    values.set("learner.lora.rank", int(values.get(model + "lora_rank")))
    values.set("learner.lora.alpha", int(values.get(model + "lora_alpha")))
    modules = values.get(model + "target_modules")
    names = modules if isinstance(modules, list) else [modules]
    if "all-linear" not in names and "lm_head" not in names:
        values.set("learner.lora.target_modules", names)
    elif "lm_head" in names:
        values.lose(model + "target_modules", "replaced by all-linear: lm_head cannot be adapted")


def _set_batches(values: Values, longest: int) -> None:
    size, mini = int(values.get("data.train_batch_size")), int(values.get(_ACTOR + "ppo_mini_batch_size"))
    values.set("learner.minibatches_per_step", max(1, math.ceil(size / mini)))
    per_gpu, whole = values.get(_ACTOR + "ppo_micro_batch_size_per_gpu"), values.get(_ACTOR + "ppo_micro_batch_size")
    if values.get(_ACTOR + "use_dynamic_bsz"):
        tokens = int(values.get(_ACTOR + "ppo_max_token_len_per_gpu"))
    elif per_gpu or whole:
        tokens = longest * int(per_gpu or max(1, int(whole) // _num_gpus(values)))
    else:
        tokens = 16384
    values.set("learner.micro_batch_tokens", max(tokens, 16))


def _num_gpus(values: Values) -> int:
    return _count(values, "trainer", 8) + _num_rollout_gpus(values)


def _num_rollout_gpus(values: Values) -> int:
    """GPUs of engines in verl's asynchronous trainers, which do not share GPUs either. 0: they take turns."""
    return _count(values, "rollout", 0) if values.is_given("rollout.n_gpus_per_node") else 0


def _count(values: Values, section: str, default: int) -> int:
    """A number that is not one, as from a variable that only the cluster knows, counts as the default."""
    per_node, nodes = values.get(f"{section}.n_gpus_per_node"), values.get(f"{section}.nnodes")
    return (int(per_node) if str(per_node).isdigit() else default) * (int(nodes) if str(nodes).isdigit() else 1)


def _set_gpus(values: Values) -> None:
    has_reference = values.fields["learner"]["algorithm"]["kl"]["placement"] != "none"
    if "lora" in values.fields["learner"] and "path" not in values.fields["learner"].get("reference", {}):
        has_reference = False
    roles = (
        "policy", *["reference"] * has_reference, *["critic"] * has_critic(values),
        *["reward_model"] * bool(values.get("reward_model.enable")),
    )  # fmt: skip
    context_parallel = int(values.get(_ACTOR + "megatron.context_parallel_size") or 1)
    sequence_parallel = max(int(values.get(_ACTOR + "ulysses_sequence_parallel_size") or 1), context_parallel)
    tensor_parallel = int(values.get(_ROLLOUT + "tensor_model_parallel_size"))
    divided = divide(_num_gpus(values), tensor_parallel, sequence_parallel, roles, _num_rollout_gpus(values))
    if divided.sequence_parallel != sequence_parallel:
        values.lose(
            _ACTOR + "ulysses_sequence_parallel_size",
            f"made smaller, {divided.sequence_parallel}, to fit half of the GPUs",
        )
    values.set("rollout.num_servers", divided.num_servers)
    values.set("rollout.engine.tensor_parallel_size", divided.tensor_parallel)
    utilization = values.get(_ROLLOUT + "gpu_memory_utilization")
    values.set(
        "rollout.engine.gpu_memory_utilization",
        0.9 if divided.utilization is None else min(float(utilization), divided.utilization),
    )
    values.set("learner.sequence_parallel", divided.sequence_parallel)
    values.set("learner.placement", "split-collocate" if len(roles) > 1 else "standalone")
    for role, gpus in divided.roles.items():
        values.set(f"learner.{role}.num_ranks", gpus.num_ranks)
        values.set(f"learner.{role}.gpus_per_rank", gpus.gpus_per_rank)


def _set_output(values: Values) -> None:
    frequency = int(values.get("trainer.save_freq"))
    values.set("learner.checkpoint.every_steps", frequency if frequency > 0 else CheckpointConfig().every_steps)
    if values.get("trainer.max_actor_ckpt_to_keep"):
        values.set("learner.checkpoint.keep", int(values.get("trainer.max_actor_ckpt_to_keep")))
    mode = values.get("trainer.resume_mode")
    values.set("learner.checkpoint.resume", "off" if mode == "disable" else "auto")
    if mode == "resume_path":
        values.lose(
            "trainer.resume_mode",
            "verl's checkpoints cannot be read: merge one to a Hugging Face folder and set model.path",
        )
    set_loggers(values)
    steps = values.get("global_profiler.steps")
    if isinstance(steps, list) and steps:
        values.set("learner.profile.steps", [int(step) for step in steps if int(step) >= 1])


def set_loggers(values: Values) -> None:
    loggers = values.get("trainer.logger")
    names = [str(name) for name in (loggers if isinstance(loggers, list) else [loggers])]
    known = [_LOGGERS[name] for name in names if name in _LOGGERS]
    values.set("learner.loggers", list(dict.fromkeys([*known, "jsonl"])))
    if others := [name for name in names if name not in _LOGGERS]:
        values.lose("trainer.logger", f"{', '.join(others)}: loggers are console, jsonl, tensorboard and wandb")
    if "wandb" in known:
        values.set("learner.wandb.project", values.get("trainer.project_name"))
