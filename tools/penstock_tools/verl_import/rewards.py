"""Translates rewards: the reward function, the reward manager, and the reward model."""

from __future__ import annotations

from penstock_tools.verl_import.values import Values, local_path

_OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."


def set_rewards(values: Values, max_response: int) -> None:
    manager = _manager(values)
    values.set("rollout.reward.compat", "verl")
    if values.is_given("custom_reward_function.path"):
        values.set_direct(prefixes=("custom_reward_function.",))
        values.set("rollout.reward.function_name", values.get("custom_reward_function.name"))
        if arguments := values.below("custom_reward_function.reward_kwargs"):
            values.set("rollout.reward.function_kwargs", arguments)
        if manager == "batch":
            values.set("rollout.reward.function_batch", True)
    if values.is_given("reward_model.num_workers"):
        values.set("rollout.reward.num_processes", int(values.get("reward_model.num_workers")))
    if manager == "dapo" and values.get(_OVERLONG + "enable"):
        _set_overlong(values, max_response)
    if values.get("reward_model.enable"):
        _set_reward_model(values)
    else:
        values.ignore("reward_model.model.")


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
