"""Translates the engines, the prompts and the agents of rollout servers."""

from __future__ import annotations

import math

from penstock_tools.verl_import.values import Values

_ROLLOUT = "actor_rollout_ref.rollout."
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
