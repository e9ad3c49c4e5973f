"""Translates a verl training run: what keys.csv does not convert key by key, because it follows from several keys."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from penstock.config.algorithms import ADVANTAGE_NAMES, COMPARING_ADVANTAGES
from penstock_tools.starter import collocate
from penstock_tools.verl_import.keys import CONVERTERS, OWN, TEXT_ONLY, Values, kl_penalty, listed, local_path

_ACTOR = "actor_rollout_ref.actor."
_MODEL = "actor_rollout_ref.model."
_ROLLOUT = "actor_rollout_ref.rollout."
_TURNS = "actor_rollout_ref.rollout.multi_turn."
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
_NEVER = 1_000_000
"""Steps between validations of a run that verl validates before training only."""


def set_run(values: Values, max_staleness: int) -> None:
    max_response = int(values.get("data.max_response_length"))
    longest = int(values.get("data.max_prompt_length")) + max_response
    values.set_direct(*_unused(values))
    values.set("dataset.last_batch", "drop")
    values.set("dataset.max_tokens", int(values.get(_ROLLOUT + "response_length") or max_response))
    if float(values.get(_ROLLOUT + "temperature")) <= 0:
        values.set("dataset.temperature", 1.0)
        values.lose(_ROLLOUT + "temperature", "training needs samples: 1.0 is used")
    _set_validation(values, max_response)
    look_at_model(values, _MODEL + "path")
    values.set("replay.max_staleness", max_staleness)
    if max_staleness == 0:
        values.set("replay.stale_policy", "wait")
    _set_engine(values, longest)
    cut = str(values.get("data.truncation"))
    is_cut = cut in ("left", "right", "middle") and not values.get("data.filter_overlong_prompts")
    values.set("rollout.prompt.overlong", f"truncate_{cut}" if is_cut else "filter")
    if _has_agents(values):
        _set_agents(values, longest)
    _set_rewards(values, max_response)
    _set_learner(values)
    set_algorithm(values, max_staleness, max_response)
    _set_batches(values, longest)
    _set_gpus(values)


def _unused(values: Values) -> list[str]:
    """Beginnings of the keys that have no effect in this run."""
    used = {
        "critic.": has_critic(values),
        "trainer.critic_warmup": has_critic(values),
        "data.val_files": _validates(values),
        "trainer.val_": _validates(values),
        _VALIDATION: _validates(values),
        _TURNS: _has_agents(values),
        "custom_reward_function.": values.is_given("custom_reward_function.path"),
        "algorithm.kl_ctrl.": has_kl_reward(values),
        "algorithm.gdpo_": values.get("algorithm.adv_estimator") == "gdpo",
        _ACTOR + "policy_loss.dro_beta": loss_name(values) == "dro",
        "trainer.project_name": "wandb" in listed(values.get("trainer.logger")),
    }
    return [prefix for prefix, is_used in used.items() if not is_used]


def look_at_model(values: Values, key: str) -> None:
    """Warn of a model that reads images, by its name, and of a checkpoint that training would have begun with."""
    if re.search(r"vl(?![a-z])|vision|omni", Path(values.get(key)).name, re.IGNORECASE):
        values.lose(key, f"{TEXT_ONLY}, and by its name the model reads images: choose another one")
    if (values.given.get("data.image_key"), values.given.get("data.video_key")) == ("images", "videos"):
        values.ignore("data.image_key", "data.video_key", "data.audio_key")  # a file with all of verl's defaults
    if values.get("trainer.resume_mode") != "resume_path":
        values.ignore("trainer.resume_from_path")


def steps_of_files(values: Values) -> int | None:
    """The steps over the rows of the training files, if these are on this machine."""
    paths = [local_path(path) for path in listed(values.get("data.train_files"))]
    if not all(path.endswith(".parquet") and Path(path).is_file() for path in paths):
        return None
    from pyarrow import parquet

    num_rows = sum(int(parquet.ParquetFile(path).metadata.num_rows) for path in paths)
    return int(values.get("trainer.total_epochs")) * (num_rows // int(values.get("data.train_batch_size"))) or None


def _validates(values: Values) -> bool:
    frequency = int(values.get("trainer.test_freq"))
    is_on = frequency > 0 or values.get("trainer.val_before_train") or values.get("trainer.val_only")
    return bool(values.get("data.val_files") and is_on)


def _set_validation(values: Values, max_response: int) -> None:
    if not _validates(values):
        values.lose("data.val_files", "the run never validates: test_freq and val_before_train are off")
        return
    frequency, num_samples = int(values.get("trainer.test_freq")), int(values.get(_VALIDATION + "n"))
    values.set("dataset.validation.every_steps", frequency if frequency > 0 else _NEVER)
    values.set("dataset.validation.max_tokens", max_response)
    if num_samples > 1 and values.ours("dataset.validation.temperature") == 0:
        values.set("dataset.validation.num_samples", 1)
        reason = "one is made, as all are the same at temperature 0: set dataset.validation.temperature and num_samples"
        values.lose(_VALIDATION + "n", reason)


# ── the learner ──


def _set_learner(values: Values) -> None:
    num_steps = values.ours("learner.num_steps") if values.get("trainer.total_training_steps") else None
    num_steps = num_steps or steps_of_files(values)
    set_warmup(values, _ACTOR + "optim.", num_steps, int(values.get(_ACTOR + "optim.lr_warmup_steps")) <= 0)
    schedule = values.ours("learner.lr_schedule")
    if schedule != "constant" and num_steps is None:
        values.set("learner.lr_schedule", "constant")
        reason = f"set learner.num_steps, where the schedule ends, and learner.lr_schedule: {schedule}"
        values.lose(_ACTOR + "optim.lr_scheduler_type", reason)
    elif schedule != "constant":
        values.set("learner.num_steps", num_steps)
    set_lora(values, _MODEL)
    if not has_critic(values):
        values.ignore("critic.")
        return
    has_ratio = int(values.get("critic.optim.lr_warmup_steps")) <= 0
    set_warmup(values, "critic.optim.", num_steps, has_ratio, "learner.critic.warmup_steps")
    set_lora(values, "critic.model.", "learner.critic.lora")
    if values.ours("learner.lr_schedule") != str(values.get("critic.optim.lr_scheduler_type")):
        values.findings.notes.append("the critic follows the policy's lr_schedule, which verl's does not")
    if values.is_given("critic.model.path"):
        path = local_path(values.get("critic.model.path"))
        if path != values.fields["model"]["path"]:
            values.set("learner.critic.path", path)


def set_warmup(
    values: Values, optim: str, num_steps: int | None, has_ratio: bool, ours: str = "learner.warmup_steps"
) -> None:
    """Set the steps of a warm-up from the keys below `optim`: a number, or with `has_ratio` a share of all steps."""
    key, warmup = optim + "lr_warmup_steps_ratio", int(values.get(optim + "lr_warmup_steps"))
    ratio = float(values.get(key))
    if has_ratio and ratio > 0:
        if num_steps is None:
            values.lose(key, f"the steps of the run are not known here: set {ours} to this share of them")
            if not values.is_given(key):
                values.findings.notes.append(
                    f"verl warms up for {ratio} of the steps, which are not known here: set {ours}"
                )
        warmup = int(ratio * (num_steps or 0))
    values.set(ours, max(0, warmup))


def set_lora(values: Values, model: str, ours: str = "learner.lora") -> None:
    """Set the adapter, if there is one, from the keys below `model`."""
    if int(values.get(model + "lora_rank") or 0) <= 0:
        values.ignore(model + "lora", model + "target_modules", model + "exclude_modules")
        return
    values.set(f"{ours}.rank", int(values.get(model + "lora_rank")))
    is_of_megatron = values.original.get(model + "lora_rank", "").endswith("lora.rank")
    has_default = is_of_megatron and not values.is_given(model + "lora_alpha")
    values.set(f"{ours}.alpha", 32 if has_default else int(values.get(model + "lora_alpha")))
    names = listed(values.get(model + "target_modules"))
    if "lm_head" in names:
        values.lose(model + "target_modules", "replaced by all-linear: lm_head cannot be adapted")
    elif "all-linear" not in names:
        values.set(f"{ours}.target_modules", names)


def _set_batches(values: Values, longest: int) -> None:
    size, mini = int(values.get("data.train_batch_size")), int(values.get(_ACTOR + "ppo_mini_batch_size"))
    values.set("learner.minibatches_per_step", max(1, math.ceil(size / mini)))
    if has_critic(values):
        mini = int(values.get("critic.ppo_mini_batch_size") or mini)
        values.set("learner.critic.minibatches_per_step", max(1, math.ceil(size / mini)))
    per_gpu, whole = values.get(_ACTOR + "ppo_micro_batch_size_per_gpu"), values.get(_ACTOR + "ppo_micro_batch_size")
    if values.get(_ACTOR + "use_dynamic_bsz"):
        tokens = int(values.get(_ACTOR + "ppo_max_token_len_per_gpu"))
    elif per_gpu or whole:
        tokens = longest * int(per_gpu or max(1, int(whole) // _num_gpus(values)))
    else:
        tokens = 16384
    values.set("learner.micro_batch_tokens", max(tokens, 16))


# ── engines and agents of the rollout servers ──


def _set_engine(values: Values, longest: int) -> None:
    name = str(values.get(_ROLLOUT + "name"))
    values.set("rollout.engine.max_model_len", max(int(values.get(_ROLLOUT + "max_model_len") or longest), longest))
    num_seqs, num_samples = int(values.get(_ROLLOUT + "max_num_seqs")), int(values.get(_ROLLOUT + "n"))
    values.set("rollout.max_concurrent_groups", max(64, math.ceil(2 * num_seqs / num_samples)))
    # Arguments of other engines than the chosen one have no effect in verl either.
    is_known = values.ours("rollout.engine.name") != "auto"
    extra = dict(values.below(_ROLLOUT + "engine_kwargs").get(name, {})) if is_known else {}
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


def _has_agents(values: Values) -> bool:
    return any(key.startswith((_TURNS, _ROLLOUT + "agent.default")) for key in values.given)


def _set_agents(values: Values, longest: int) -> None:
    """Set the default agent to verl's own choice or, with `multi_turn.enable`, which chose for all rows in older
    versions, to what is given. Without a limit of turns, the one on replies or the length gives it, as in verl."""
    key = _ROLLOUT + "agent.default_agent_loop"
    name = str(values.get(key))
    if name not in ("single_turn_agent", "tool_agent"):
        values.lose(
            key, "port the class (docs/coming-from-verl.md#porting-classes) and name it in rollout.agents.default_agent"
        )
        name = "single_turn_agent"
    if values.get(_TURNS + "enable") and not values.is_given(key):
        if values.is_given(_TURNS + "tool_config_path"):
            name = "tool_agent"
        elif values.is_given(_TURNS + "interaction_config_path"):
            name = "interaction_agent"
    values.set("rollout.agents.default_agent", name)
    replies = values.get(_TURNS + "max_user_turns")
    given = values.get(_TURNS + "max_assistant_turns") or (int(replies) + 1 if replies else max(1, longest // 3))
    values.set("rollout.agents.max_turns", int(given))
    values.set("rollout.agents.turn_rewards", "record")


# ── rewards ──

_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."


def _set_rewards(values: Values, max_response: int) -> None:
    key = "reward_model.reward_manager"
    manager = "dapo" if values.program == "dapo" and not values.is_given(key) else str(values.get(key))
    if manager not in ("naive", "dapo", "batch", "prime", "gdpo", "remote"):
        values.lose(key, "write the manager as `compute_score`: docs/coming-from-verl.md#porting-classes")
    values.set("rollout.reward.compat", "verl")
    if manager == "batch" and values.is_given("custom_reward_function.path"):
        values.set("rollout.reward.function_batch", True)
    if manager == "dapo" and values.get(_OVERLONG + "enable"):
        _set_overlong(values, max_response)
    if values.get("reward_model.enable"):
        _set_reward_model(values)
    else:
        values.ignore("reward_model.model.")


def _set_overlong(values: Values, max_response: int) -> None:
    longest = int(values.get("reward_model.reward_kwargs.max_resp_len") or max_response)
    buffer = int(values.get(_OVERLONG + "len") or 0)
    if not 0 < buffer <= longest:
        values.lose(_OVERLONG + "len", "the buffer must be above 0 and at most max_resp_len; no penalty is set")
        return
    factor = float(values.get(_OVERLONG + "penalty_factor"))
    overlong = {"max_num_tokens": longest, "buffer_num_tokens": buffer, "factor": factor}
    values.set("learner.algorithm.overlong", overlong)


def _set_reward_model(values: Values) -> None:
    """Its scores replace those of rules, as in verl, so that rollout servers compute none."""
    tokenizer = "reward_model.model.input_tokenizer"
    reads_tokens = tokenizer in values.given and not values.is_given(tokenizer)
    path = local_path(values.get("reward_model.model.path"))
    values.set("learner.reward_model.path", path)
    values.set("learner.reward_model.tokenizer", "policy" if reads_tokens else "own")
    values.set("learner.reward_model.combine", "replace")
    if values.get("reward_model.model.fsdp_config.param_offload"):
        values.set("learner.reward_model.offload", True)
    values.set("rollout.reward.by_data_source", {"*": {"kind": "reward_model"}})
    filtered = "algorithm.filter_groups.enable"
    if values.get(filtered):
        values.set("replay.dynamic_sampling", False)
        values.lose(filtered, "groups are filtered by the rewards of rules, which the reward model replaces")


# ── GPUs, on which everything takes turns in verl ──


def number(value: Any, default: int) -> int:
    """A number that is not one, as from a variable that only the cluster knows, counts as the default."""
    return int(value) if str(value).isdigit() else default


def _num_rollout_gpus(values: Values) -> int:
    """GPUs of engines in verl's asynchronous trainers, which do not share GPUs either. 0 if they take turns."""
    return number(values.get("rollout.n_gpus_per_node"), 0) * number(values.get("rollout.nnodes"), 1)


def _num_gpus(values: Values) -> int:
    own = number(values.get("trainer.n_gpus_per_node"), 8) * number(values.get("trainer.nnodes"), 1)
    return own + _num_rollout_gpus(values)


_ULYSSES_OF = {
    "reference": "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
    "critic": "critic.ulysses_sequence_parallel_size",
    "reward_model": "reward_model.ulysses_sequence_parallel_size",
}


def _set_gpus(values: Values) -> None:
    learner = values.fields["learner"]
    is_adapter = "lora" in learner and "path" not in learner.get("reference", {})
    has_reference = learner["algorithm"]["kl"]["placement"] != "none" and not is_adapter
    roles = (
        "policy", *["reference"] * has_reference, *["critic"] * has_critic(values),
        *["reward_model"] * bool(values.get("reward_model.enable")),
    )  # fmt: skip
    ulysses, context = _ACTOR + "ulysses_sequence_parallel_size", _ACTOR + "megatron.context_parallel_size"
    sequence_parallel = max(int(values.get(ulysses) or 1), int(values.get(context) or 1))
    tensor_parallel = int(values.get(_ROLLOUT + "tensor_model_parallel_size"))
    divided = collocate(_num_gpus(values), roles, tensor_parallel, sequence_parallel, _num_rollout_gpus(values))
    if divided.sequence_parallel != sequence_parallel:
        values.lose(ulysses, f"made smaller, {divided.sequence_parallel}, to fit half of the GPUs")
    given = float(values.get(_ROLLOUT + "gpu_memory_utilization"))
    shared = divided.gpu_memory_utilization
    utilization = 0.9 if shared is None else min(given, shared)
    values.set("rollout.num_servers", divided.num_servers)
    values.set("rollout.engine.tensor_parallel_size", divided.tensor_parallel)
    values.set("rollout.engine.gpu_memory_utilization", utilization)
    values.set("learner.sequence_parallel", divided.sequence_parallel)
    values.set("learner.placement", "split-collocate" if len(roles) > 1 else "standalone")
    for role, gpus in divided.roles.items():
        values.set(f"learner.{role}.num_ranks", gpus.num_ranks)
        values.set(f"learner.{role}.gpus_per_rank", gpus.gpus_per_rank)
        key = _ULYSSES_OF.get(role, "")
        # verl's reference takes the policy's number.
        wanted = int(values.get(key) or (sequence_parallel if role == "reference" else 1)) if key else 1
        if wanted > 1:
            num_sharing = math.gcd(wanted, gpus.num_ranks)
            values.set(f"learner.{role}.sequence_parallel", num_sharing)
            if num_sharing != wanted:
                values.lose(key, f"made smaller, {num_sharing}, to divide the ranks of the {role}")


# ── the algorithm: advantage, loss, KL penalty and off-policy correction ──


_CORRECTION = "algorithm.rollout_correction."
_OURS = "learner.algorithm."
_ADVANTAGES = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
_OF_SEQUENCES = ("geo_mean", "sapo")
"""Losses that verl averages within each sequence first, whatever its config says."""


def has_critic(values: Values) -> bool:
    return values.get("algorithm.adv_estimator") == "gae" and values.given.get("critic.enable") is not False


def has_kl_reward(values: Values) -> bool:
    return bool(values.get("algorithm.use_kl_in_reward")) and values.get("algorithm.adv_estimator") != "gdpo"


def loss_name(values: Values) -> str:
    is_reinforce = values.get(_CORRECTION + "loss_type") == "reinforce"
    if values.get(_CORRECTION + "bypass_mode") and (is_reinforce or values.get(_CORRECTION + "use_policy_gradient")):
        return "reinforce"
    return str(values.converted(_ACTOR + "policy_loss.loss_mode", CONVERTERS["loss"]))


def set_algorithm(values: Values, max_staleness: int, max_response: int) -> None:
    _set_advantage(values)
    _set_loss(values, max_response)
    _set_kl(values)
    _set_correction(values, max_staleness)
    _set_rejection(values)
    mode = str(values.get(_ACTOR + "router_replay.mode"))
    if values.get("actor_rollout_ref.rollout.enable_rollout_routing_replay") or mode == "R3":
        values.set("learner.router.replay", True)
    elif mode not in ("disabled", "None"):
        values.lose(_ACTOR + "router_replay.mode", "the learner replays the engine's experts (R3) or none")


def _set_advantage(values: Values) -> None:
    key = "algorithm.adv_estimator"
    name = str(values.get(key))
    ours = _ADVANTAGES.get(name, name)
    if name == "gae" and not has_critic(values):
        ours = "reinforce_plus_plus"
        values.lose(key, "gae without a critic is replaced by reinforce_plus_plus")
    elif ours not in ADVANTAGE_NAMES:
        ours = "grpo"
        values.lose(key, f"replaced by grpo; {OWN}")
    elif ours in COMPARING_ADVANTAGES and int(values.get(_ROLLOUT + "n")) == 1:
        values.lose(
            key, f"{name} compares samples: one is trained by grpo, on its bare reward; set dataset.num_samples"
        )
        ours = "grpo"
        values.set(_OURS + "advantage.normalize_by_std", False)
    values.set(_OURS + "advantage.name", ours)
    if ours != "gdpo":
        values.ignore("algorithm.gdpo_")
    if ours == "remax":
        values.findings.notes.append(
            "remax: each prompt gets one more sample, the greedy baseline, which is not trained on"
        )


def _set_loss(values: Values, max_response: int) -> None:
    name, aggregation = loss_name(values), values.get(_ACTOR + "loss_agg_mode")
    values.set(_OURS + "loss.name", name)
    if name in ("clip_cov", "kl_cov"):
        values.set(_OURS + "loss.cov_share", values.get(_ACTOR + f"policy_loss.{name}_ratio"))
    for side in ("low", "high"):
        given = [values.given.get(_ACTOR + key) for key in (f"clip_ratio_{side}", "clip_ratio")]
        values.set(_OURS + f"loss.clip_{side}", next((value for value in given if value is not None), 0.2))
    values.set(_OURS + "loss.aggregation", "seq-mean-token-mean" if name in _OF_SEQUENCES else aggregation)
    if name == "gspo" and aggregation != "seq-mean-token-mean":
        values.findings.notes.append(
            f"gspo is averaged by {aggregation}, as in verl 0.9; older versions always took seq-mean-token-mean"
        )
    if aggregation == "seq-mean-token-sum-norm" and name not in _OF_SEQUENCES:
        values.set(_OURS + "loss.constant_length", values.get(_ACTOR + "loss_scale_factor") or max_response)
    if has_critic(values):
        critic_aggregation = values.get("critic.loss_agg_mode") or aggregation
        values.set(_OURS + "value_loss.aggregation", critic_aggregation)
        if critic_aggregation == "seq-mean-token-sum-norm":
            values.set(_OURS + "value_loss.constant_length", max_response)


def _set_kl(values: Values) -> None:
    in_reward, in_loss = has_kl_reward(values), bool(values.get(_ACTOR + "use_kl_loss"))
    if values.get("algorithm.adv_estimator") == "gdpo":
        values.lose("algorithm.use_kl_in_reward", "gdpo uses the parts of the reward alone, here and in verl")
    placement = {(True, True): "both", (True, False): "reward", (False, True): "loss"}.get((in_reward, in_loss), "none")
    values.set(_OURS + "kl.placement", placement)
    if in_reward:
        values.set(_OURS + "kl.penalty", values.converted("algorithm.kl_penalty", kl_penalty))
        values.set(_OURS + "kl.coefficient", values.get("algorithm.kl_ctrl.kl_coef"))
    if in_loss:
        prefix = "loss_" if in_reward else ""
        values.set(_OURS + f"kl.{prefix}penalty", values.converted(_ACTOR + "kl_loss_type", kl_penalty))
        values.set(_OURS + f"kl.{prefix}coefficient", values.get(_ACTOR + "kl_loss_coef"))


def _set_correction(values: Values, max_staleness: int) -> None:
    ours, key = _OURS + "correction.", _CORRECTION + "rollout_is"
    low, _, cap = str(values.get(_CORRECTION + "rollout_is_threshold")).rpartition("_")
    weight = values.get(key) if values.get(key) in ("token", "sequence") else ""
    is_reinforce = values.ours(_OURS + "loss.name") == "reinforce"
    if values.get(_CORRECTION + "bypass_mode") or is_reinforce:
        values.set(ours + "mode", "bypass")
        if weight:
            values.lose(key, "with bypass_mode the ratio of the loss is already that to the engine's policy")
        if is_reinforce:
            values.set(_OURS + "loss.ratio_cap", float(cap))
    elif weight or max_staleness > 0:
        values.set(ours + "mode", "decoupled")
        values.set(ours + "weight", "band" if low else f"{weight or 'token'}_truncation")
        for name, bound in {"band_low": low, "band_high": cap}.items() if low else (("cap", cap),):
            values.set(ours + name, float(bound))
        if low and weight == "sequence":
            values.lose(key, "a band bounds the ratios of tokens, not of sequences")
    else:
        values.set(ours + "mode", "none")


def _set_rejection(values: Values) -> None:
    ours, key = _OURS + "correction.", _CORRECTION + "rollout_rs"
    options = [option.strip() for option in str(values.get(key) or "").split(",") if option.strip() not in ("", "null")]
    names = {"token": "token", "token_k1": "token", "sequence": "sequence", "seq_sum_k1": "sequence"}
    kept = next((option for option in options if option in names), None)
    if lost := ", ".join(option for option in options if option != kept):
        values.lose(key, f"{lost}: samples are rejected by the ratio of a token or the product of a sequence only")
    if kept is None:
        return
    bounds = str(values.get(_CORRECTION + "rollout_rs_threshold") or 2.0).split(",")
    low, has_low, high = bounds[min(options.index(kept), len(bounds) - 1)].partition("_")
    upper = float(high if has_low else low)
    lower = values.get(_CORRECTION + "rollout_rs_threshold_lower") or (float(low) if has_low else 1 / upper)
    values.set(ours + "rejection", names[kept])
    values.set(ours + "rejection_low", lower)
    values.set(ours + "rejection_high", upper)
