"""Keys of the engines, of sampling and of agents."""

from __future__ import annotations

from typing import Any

from penstock_tools.verl_import.table.key import Key, alias, computed, missing, same, unneeded

_ROLLOUT = "actor_rollout_ref.rollout."
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
_TURNS = "actor_rollout_ref.rollout.multi_turn."
_NO_SHARING = "engines have GPUs of their own and are never put to sleep"


def _top_k(value: Any) -> int:
    return max(0, int(value))


ROLLOUT_KEYS: tuple[Key, ...] = (
    computed(_ROLLOUT + "name", "rollout.engine.name", "vllm"),
    unneeded(_ROLLOUT + "mode", "engines always work asynchronously"),
    same(_ROLLOUT + "n", "dataset.num_samples", 1),
    same(_ROLLOUT + "temperature", "dataset.temperature", 1.0),
    same(_ROLLOUT + "top_p", "dataset.top_p", 1.0),
    same(_ROLLOUT + "top_k", "dataset.top_k", -1, _top_k),
    same(_ROLLOUT + "ignore_eos", "dataset.ignore_eos", False),
    missing(_ROLLOUT + "do_sample", "training always samples", True),
    same(_ROLLOUT + "enforce_eager", "rollout.engine.enforce_eager", False),
    same(_ROLLOUT + "max_num_seqs", "rollout.engine.max_num_seqs", 256),
    computed(_ROLLOUT + "max_model_len", "rollout.engine.max_model_len"),
    computed(_ROLLOUT + "prompt_length", "rollout.prompt.max_tokens"),
    computed(_ROLLOUT + "response_length", "dataset.max_tokens"),
    computed(_ROLLOUT + "dtype", "model.dtype", "bfloat16"),
    computed(
        _ROLLOUT + "gpu_memory_utilization", "rollout.engine.gpu_memory_utilization", 0.5,
        "engines have their own GPUs and take 0.9; on a single GPU, which they share with training, 0.4 at most",
    ),
    computed(
        _ROLLOUT + "tensor_model_parallel_size", "rollout.engine.tensor_parallel_size rollout.num_servers", 2,
        "the engines take about half of the GPUs, and training the rest; each server takes this many GPUs",
    ),
    computed(_ROLLOUT + "quantization", "rollout.engine.quantization"),
    missing(_ROLLOUT + "quantization_config_file", "rollout.engine.quantization takes fp8 only"),
    computed(_ROLLOUT + "max_num_batched_tokens", "rollout.engine.extra"),
    computed(_ROLLOUT + "enable_chunked_prefill", "rollout.engine.extra"),
    computed(_ROLLOUT + "enable_prefix_caching", "rollout.engine.extra"),
    computed(_ROLLOUT + "engine_kwargs.*", "rollout.engine.extra"),
    missing(_ROLLOUT + "data_parallel_size", "start more servers: rollout.num_servers", 1),
    missing(_ROLLOUT + "expert_parallel_size", "give rollout.engine.extra the engine's own argument", 1),
    missing(_ROLLOUT + "pipeline_model_parallel_size", "a server splits the model by tensor parallelism only", 1),
    missing(_ROLLOUT + "cudagraph_capture_sizes", "give rollout.engine.extra the engine's own argument"),
    missing(_ROLLOUT + "scheduling_policy", "give rollout.engine.extra the engine's own argument", "fcfs"),
    missing(_ROLLOUT + "logprobs_mode", "engines return the log-probs that they sampled with", "processed_logprobs"),
    missing(_ROLLOUT + "full_determinism", "runs are reproducible by `seed`, but not bit by bit on GPUs", False),
    unneeded(_ROLLOUT + "seed", "the seeds of samples follow from `seed` and the prompt"),
    missing(_ROLLOUT + "disaggregation.enabled", "a server does prefill and decoding on the same GPUs", False),
    unneeded(_ROLLOUT + "disaggregation.*", "only used with disaggregation"),
    missing(_ROLLOUT + "qat*", "weights are trained without quantization", False, {}, "None"),
    unneeded(_ROLLOUT + "moe_load_balance_metrics_interval", "the use of experts is measured in the learner"),
    missing(_ROLLOUT + "limit_images", "models with images are not trained"),
    missing(_ROLLOUT + "over_sample_rate", "batches are filled by the prompts that finish; see replay.stale_policy", 0),
    missing(_ROLLOUT + "trust_remote_code", "code of model folders is never run", False),
    missing(_ROLLOUT + "skip_rollout", "`penstock queue export` and `import` keep and repeat samples", False),
    unneeded(_ROLLOUT + "skip_dump_dir", "`penstock queue export` writes samples"),
    unneeded(_ROLLOUT + "load_format", "engines load the model folder, then take pushed weights"),
    unneeded(_ROLLOUT + "layered_summon", "weights are gathered tensor by tensor"),
    unneeded(_ROLLOUT + "free_cache_engine", _NO_SHARING),
    unneeded(_ROLLOUT + "multi_stage_wake_up", _NO_SHARING),
    unneeded(_ROLLOUT + "calculate_log_probs", "samples always have the log-probs of their engine"),
    unneeded(_ROLLOUT + "log_prob_*", "log-probs use the budget of training, learner.micro_batch_tokens"),
    unneeded("rollout.log_prob_*", "log-probs use the budget of training, learner.micro_batch_tokens"),
    unneeded(_ROLLOUT + "disable_log_stats", "the numbers of engines are in /metrics"),
    unneeded(_ROLLOUT + "skip_tokenizer_init", "engines take and return tokens"),
    computed(_ROLLOUT + "checkpoint_engine.update_weights_bucket_megabytes", "weights.bucket_bytes"),
    computed(_ROLLOUT + "update_weights_bucket_megabytes", "weights.bucket_bytes"),
    unneeded(_ROLLOUT + "checkpoint_engine.*", "weights.transport chooses how weights are pushed"),
    computed(_ROLLOUT + "enable_rollout_routing_replay", "learner.router.replay", False),
    missing(
        _ROLLOUT + "trace.backend", "set tracing.endpoint for OpenTelemetry traces; `penstock samples` shows texts",
    ),
    unneeded(_ROLLOUT + "trace.*", "`penstock samples` shows the texts of samples"),
    unneeded(_ROLLOUT + "sglang_rollout_mode", "engines are always processes of their own"),
    unneeded(
        _ROLLOUT + "server.*", "rollout servers have their own deadlines: rollout.start_timeout_s, prompt_timeout_s",
    ),
    unneeded(_ROLLOUT + "layer_name_map.*", "weights are pushed under the names of the Hugging Face model"),
    unneeded(_ROLLOUT + "prometheus.*", "every process serves /metrics"),
    unneeded(_ROLLOUT + "mtp*", "drafts are not configured"),
    # Validation.
    same(_VALIDATION + "n", "dataset.validation.num_samples", 1),
    same(_VALIDATION + "top_p", "dataset.validation.top_p", 1.0),
    same(_VALIDATION + "top_k", "dataset.validation.top_k", -1, _top_k),
    computed(_VALIDATION + "temperature", "dataset.validation.temperature", 0),
    computed(
        _VALIDATION + "do_sample", "dataset.validation.temperature", False, "greedy decoding is temperature 0",
    ),
    # Several turns.
    computed(
        _TURNS + "enable", "rollout.agents.default_agent rollout.agents.turn_rewards", False,
        "the row's agent_name chooses the agent; rows without one get tool_agent or interaction_agent, and rewards of "
        "tools and interactions are recorded",
    ),
    same(_TURNS + "tool_config_path", "rollout.agents.tools_file"),
    missing(_TURNS + "function_tool_path", "write each function as a tool of a tools file (docs/agents.md)"),
    same(_TURNS + "interaction_config_path", "rollout.agents.interactions_file"),
    computed(
        _TURNS + "max_assistant_turns", "rollout.agents.max_turns",
        note="ours always has a limit: without one, max_user_turns + 1, or a third of the longest sequence",
    ),
    alias(_TURNS + "max_turns", _TURNS + "max_assistant_turns"),
    same(_TURNS + "max_user_turns", "rollout.agents.max_user_turns"),
    same(_TURNS + "max_parallel_calls", "rollout.agents.max_calls_per_turn", 1),
    same(_TURNS + "max_tool_response_length", "rollout.agents.max_tool_response_chars", 256),
    computed(
        _TURNS + "tool_response_truncate_side", "rollout.agents.tool_response_keep", "middle",
        "ours names the part that is kept: verl's left keeps the head, right the tail, middle both",
    ),
    computed(_TURNS + "format", "rollout.agents.tool_format", "hermes"),
    unneeded(_TURNS + "use_inference_chat_template", "turns are appended as tokens and never tokenized again"),
    unneeded(_TURNS + "tokenization_sanity_check_mode", "turns are appended as tokens and never tokenized again"),
    unneeded(_TURNS + "num_repeat_rollouts", "it is dataset.num_samples"),
    unneeded(_TURNS + "completion_callback", "agents are rollout.agents.custom"),
    computed(_ROLLOUT + "agent.default_agent_loop", "rollout.agents.default_agent", "single_turn_agent"),
    missing(
        _ROLLOUT + "agent.agent_loop_config_path",
        "port the class to a function: rollout.agents.custom (docs/agents.md)",
    ),
    unneeded(_ROLLOUT + "agent.num_workers", "each server runs its agents itself"),
    missing(_ROLLOUT + "agent.custom_async_server.*", "engines are those of rollout.engine.name"),
    unneeded("actor_rollout_ref.hybrid_engine", "engines and training are always separate processes"),
    computed("actor_rollout_ref.nccl_timeout", "learner.rank_timeout_s", 600),
)  # fmt: skip
