"""Translates a verl training run to our configuration, section by section."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config.learner import CheckpointConfig
from penstock_tools.starter import SHARED_UTILIZATION, RoleGpus, shares_of_gpus
from penstock_tools.verl_import.algorithm import has_critic, set_algorithm
from penstock_tools.verl_import.keys import Values, local_path

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
    schedule = lr_schedule(values, key)
    if schedule != "constant" and num_steps is None:
        values.lose(key, f"set learner.num_steps, where the schedule ends, and learner.lr_schedule: {schedule}")
        schedule = "constant"
    elif schedule != "constant":
        values.set("learner.num_steps", num_steps)
    values.set("learner.lr_schedule", schedule)


def lr_schedule(values: Values, key: str) -> str:
    schedule = str(values.get(key))
    if schedule in ("constant", "linear", "cosine"):
        return schedule
    values.lose(key, "replaced by constant; schedules are constant, linear and cosine")
    return "constant"


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


# ── engines, prompts and agents of the rollout servers ──

ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf": "torch"}


def set_rollout(values: Values, max_prompt: int, max_response: int) -> None:
    name = str(values.get(_ROLLOUT + "name"))
    if name not in ENGINES:
        values.lose(_ROLLOUT + "name", "replaced by auto: engines are vllm, sglang and torch")
    values.set("rollout.engine.name", ENGINES.get(name, "auto"))
    longest = max_prompt + max_response
    values.set("rollout.engine.max_model_len", max(int(values.get(_ROLLOUT + "max_model_len") or longest), longest))
    values.set_direct(prefixes=(_ROLLOUT + "enforce_eager", _ROLLOUT + "max_num_seqs"))
    num_seqs, num_samples = int(values.get(_ROLLOUT + "max_num_seqs")), int(values.get(_ROLLOUT + "n"))
    values.set("rollout.max_concurrent_groups", max(64, math.ceil(2 * num_seqs / num_samples)))
    if values.get(_ROLLOUT + "quantization") == "fp8":
        values.set("rollout.engine.quantization", "fp8")
    elif values.is_given(_ROLLOUT + "quantization"):
        values.lose(_ROLLOUT + "quantization", "rollout.engine.quantization takes fp8 only")
    _set_engine_arguments(values, name)
    values.set("rollout.prompt.max_tokens", max_prompt)
    cut = str(values.get("data.truncation"))
    is_cut = cut in ("left", "right", "middle") and not values.get("data.filter_overlong_prompts")
    values.set("rollout.prompt.overlong", f"truncate_{cut}" if is_cut else "filter")
    if arguments := values.below("data.apply_chat_template_kwargs"):
        values.set("rollout.prompt.template_arguments", arguments)
    _set_agents(values, longest)
    for key in ("checkpoint_engine.update_weights_bucket_megabytes", "update_weights_bucket_megabytes"):
        if values.is_given(_ROLLOUT + key):
            values.set("weights.bucket_bytes", int(values.get(_ROLLOUT + key)) * 2**20)


def _set_engine_arguments(values: Values, name: str) -> None:
    """Arguments of the engine that was chosen. Those of other engines have no effect in verl either."""
    extra = dict(values.below(_ROLLOUT + "engine_kwargs").get(name, {})) if name in ENGINES else {}
    for key in ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"):
        if name == "vllm" and values.is_given(_ROLLOUT + key):
            extra[key] = values.get(_ROLLOUT + key)
        else:
            values.lose(_ROLLOUT + key, f"an argument of vLLM, and the engine is {name}")
    if extra:
        values.set("rollout.engine.extra", extra)
    for key in values.given:
        if key.startswith(_ROLLOUT + "engine_kwargs.") and not f"{key}.".startswith(f"{_ROLLOUT}engine_kwargs.{name}."):
            values.lose(key, f"an argument of another engine than {name}")


def _set_default_agent(values: Values, turns: str) -> None:
    """verl's own choice or, with `multi_turn.enable`, which chose for all rows in older versions, what is given."""
    name = str(values.get(_ROLLOUT + "agent.default_agent_loop"))
    if name not in ("single_turn_agent", "tool_agent"):
        values.lose(
            _ROLLOUT + "agent.default_agent_loop",
            "port the class to a function of rollout.agents.custom and name it in default_agent (docs/agents.md)",
        )
        name = "single_turn_agent"
    if values.get(turns + "enable") and not values.is_given(_ROLLOUT + "agent.default_agent_loop"):
        has_interaction = values.is_given(turns + "interaction_config_path")
        has_tools = values.is_given(turns + "tool_config_path")
        name = "tool_agent" if has_tools else "interaction_agent" if has_interaction else name
    values.set("rollout.agents.default_agent", name)


def _max_turns(values: Values, turns: str, longest: int) -> int:
    """verl's limit. Without one, the limit on replies gives it, or the length that verl names as its default."""
    if given := values.get(turns + "max_assistant_turns"):
        return int(given)
    replies = values.get(turns + "max_user_turns")
    return int(replies) + 1 if replies else max(1, longest // 3)


def _set_agents(values: Values, longest: int) -> None:
    turns = _ROLLOUT + "multi_turn."
    has_turns = any(values.is_given(turns + key) for key in ("tool_config_path", "interaction_config_path", "enable"))
    if not has_turns and not any(key.startswith((turns, _ROLLOUT + "agent.default")) for key in values.given):
        return
    values.set_direct(prefixes=(turns,))
    _set_default_agent(values, turns)
    values.set("rollout.agents.max_turns", _max_turns(values, turns, longest))
    values.set("rollout.agents.turn_rewards", "record")
    side = str(values.get(turns + "tool_response_truncate_side"))
    kept = {"left": "head", "right": "tail"}.get(side, "both")
    values.set("rollout.agents.tool_response_keep", kept)
    tool_format = str(values.get(turns + "format"))
    if tool_format in ("hermes", "llama3_json", "openai"):
        values.set("rollout.agents.tool_format", tool_format)
    else:
        values.lose(turns + "format", "write a parser: rollout.agents.tool_format (docs/agents.md)")


# ── rewards ──

_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."


def set_rewards(values: Values, max_response: int) -> None:
    manager = _manager(values)
    values.set("rollout.reward.compat", "verl")
    if set_reward_function(values) and manager == "batch":
        values.set("rollout.reward.function_batch", True)
    if values.is_given("reward_model.num_workers"):
        values.set("rollout.reward.num_processes", int(values.get("reward_model.num_workers")))
    if manager == "dapo" and values.get(_OVERLONG + "enable"):
        _set_overlong(values, max_response)
    if values.get("reward_model.enable"):
        _set_reward_model(values)
    else:
        values.ignore("reward_model.model.")


def set_reward_function(values: Values) -> bool:
    """Set the user's reward function, if there is one. Returns whether there is."""
    if not values.is_given("custom_reward_function.path"):
        return False
    values.set("rollout.reward.function_file", local_path(values.get("custom_reward_function.path")))
    values.set("rollout.reward.function_name", values.get("custom_reward_function.name"))
    if arguments := values.below("custom_reward_function.reward_kwargs"):
        values.set("rollout.reward.function_kwargs", arguments)
    return True


def _manager(values: Values) -> str:
    key = "reward_model.reward_manager"
    default = "dapo" if values.program == "dapo" else "naive"
    name = str(values.get(key)) if values.is_given(key) else default
    if name not in ("naive", "dapo", "batch", "prime"):
        values.lose(key, "a class can be the reward function: rollout.reward.function_name (docs/rewards.md)")
    return name


def _set_overlong(values: Values, max_response: int) -> None:
    ours = "learner.algorithm.overlong."
    longest = int(values.get("reward_model.reward_kwargs.max_resp_len") or max_response)
    buffer = int(values.get(_OVERLONG + "len") or 0)
    if not 0 < buffer <= longest:
        values.lose(_OVERLONG + "len", "the buffer must be above 0 and at most max_resp_len; no penalty is set")
        return
    values.set(ours + "max_num_tokens", longest)
    values.set(ours + "buffer_num_tokens", buffer)
    values.set(ours + "factor", float(values.get(_OVERLONG + "penalty_factor")))


def _set_reward_model(values: Values) -> None:
    """Its scores replace those of rules, as in verl, so that rollout servers compute none."""
    ours = "learner.reward_model."
    values.set(ours + "path", local_path(values.get("reward_model.model.path")))
    reads_tokens = "reward_model.model.input_tokenizer" in values.given and not values.is_given(
        "reward_model.model.input_tokenizer"
    )
    values.set(ours + "tokenizer", "policy" if reads_tokens else "own")
    values.set(ours + "combine", "replace")
    values.set("rollout.reward.by_data_source", {"*": {"kind": "reward_model"}})
    if values.get("algorithm.filter_groups.enable"):
        values.set("replay.dynamic_sampling", False)
        values.lose(
            "algorithm.filter_groups.enable",
            "groups are filtered by the rewards of rules, which the reward model replaces",
        )


# ── GPUs, on which everything takes turns in verl ──


@dataclass(frozen=True)
class Division:
    num_servers: int
    tensor_parallel: int
    sequence_parallel: int
    roles: dict[str, RoleGpus]
    utilization: float | None
    """Set if the only server shares its GPU with training."""


def divide(
    num_gpus: int, tensor_parallel: int, sequence_parallel: int, roles: tuple[str, ...], num_rollout: int = 0
) -> Division:
    """Half of the GPUs, or `num_rollout` of them, for engines. Policy and reference share GPUs, and so do critic and
    reward model. A tensor or sequence parallelism that leaves no GPU for the other side is made smaller."""
    if num_gpus <= 1:
        return Division(1, 1, 1, shares_of_gpus(roles, 1), SHARED_UTILIZATION)
    for_engines = num_rollout or num_gpus // 2
    while tensor_parallel > for_engines:
        tensor_parallel = max(1, tensor_parallel // 2)
    num_servers = for_engines // tensor_parallel
    left = num_gpus - num_servers * tensor_parallel
    beside = tuple(role for role in roles if role in ("critic", "reward_model"))
    if beside and left == 1:
        return Division(num_servers, tensor_parallel, 1, shares_of_gpus(roles, 1), None)
    num_beside = left // 2 if beside else 0
    num_policy = left - num_beside
    while num_policy % sequence_parallel and num_policy >= 1:
        if num_policy > sequence_parallel:
            num_policy -= 1
        else:
            sequence_parallel = max(1, sequence_parallel // 2)
    with_policy = tuple(role for role in roles if role not in beside)
    divided = shares_of_gpus(with_policy, num_policy) | (shares_of_gpus(beside, num_beside) if beside else {})
    return Division(num_servers, tensor_parallel, sequence_parallel, divided, None)
