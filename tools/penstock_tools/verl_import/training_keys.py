"""The rows of the table of verl's keys, and the keys of its training programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["same", "changed", "unneeded", "missing"]


@dataclass(frozen=True)
class Key:
    """A key of verl and what becomes of it.

    same: ours means the same. changed: ours is set from it, and `note` says what differs. unneeded: nothing is lost
    without it. missing: there is no counterpart, and `note` says why or what to do."""

    verl: str
    """Dotted name. `*` stands for any text."""
    status: Status
    ours: tuple[str, ...] = ()
    """Dotted names of our fields."""
    note: str = ""
    default: Any = None
    """verl's default. It holds for a run that does not set the key."""
    convert: Callable[[Any], Any] | None = None
    """Makes our value from verl's. None: `run.py` computes it, from several keys."""
    harmless: tuple[Any, ...] = ()
    """Values of a missing key that ask for nothing."""
    alias_of: str = ""
    """The key that this is another name of, in older or newer versions. If both end with `*`, so do all keys below."""


def same(verl: str, ours: str, default: Any = None, convert: Callable[[Any], Any] = lambda value: value) -> Key:
    """Our field takes the value, or the converted value."""
    return Key(verl, "same", (ours,), default=default, convert=convert)


def computed(verl: str, ours: str, default: Any = None, note: str = "") -> Key:
    """`run.py` computes our fields. With a note the meaning differs."""
    return Key(verl, "changed" if note else "same", tuple(ours.split()), note, default)


def unneeded(verl: str, note: str, default: Any = None) -> Key:
    return Key(verl, "unneeded", note=note, default=default)


def missing(verl: str, note: str, *harmless: Any) -> Key:
    return Key(verl, "missing", note=note, default=harmless[0] if harmless else None, harmless=(*harmless, None))


def alias(verl: str, of: str) -> Key:
    return Key(verl, "same", alias_of=of, note=f"another name of `{of}`")


# ── data, rewards, the trainer and the tools around it ──

_RM = "reward_model."
_OVERLONG = "learner.algorithm.overlong"
_MEGATRON = "the learner shards by FSDP2 instead of Megatron's parallelism"
_PROFILE = "set learner.profile, which records torch profiles of named steps"
_RM_GPUS = "the reward model runs in the learner, on GPUs of its own: learner.reward_model"

DATA_KEYS: tuple[Key, ...] = (
    computed("data.train_files", "dataset.file", "~/data/rlhf/gsm8k/train.parquet"),
    computed("data.val_files", "dataset.validation.file", "~/data/rlhf/gsm8k/test.parquet"),
    computed(
        "data.train_batch_size", "replay.groups_per_step", 1024,
        "as in verl, it counts prompts: a step trains on this x rollout.n samples",
    ),
    unneeded("data.gen_batch_size", "prompts are generated one by one until the batch is full"),
    unneeded("data.val_batch_size", "validation prompts are answered as engines have room"),
    computed("data.max_prompt_length", "rollout.prompt.max_tokens rollout.engine.max_model_len", 512),
    computed("data.max_response_length", "dataset.max_tokens dataset.validation.max_tokens", 512),
    same("data.prompt_key", "dataset.columns.prompt", "prompt"),
    same("data.reward_fn_key", "dataset.columns.data_source", "data_source"),
    same("data.shuffle", "dataset.shuffle", True),
    computed("data.seed", "dataset.shuffle_seed"),
    computed(
        "data.filter_overlong_prompts", "rollout.prompt.overlong", False,
        "long prompts are found when they are sampled, and go to the dead letters; verl filters them before the run",
    ),
    computed(
        "data.truncation", "rollout.prompt.overlong", "error",
        "`error` becomes `filter`: a prompt that is too long goes to the dead letters, and the run goes on",
    ),
    unneeded("data.filter_overlong_prompts_workers", "prompts are measured when they are sampled"),
    computed("data.apply_chat_template_kwargs.*", "rollout.prompt.template_arguments"),
    missing("data.apply_chat_template_kwargs", "", {}),
    missing("data.custom_cls.*", "write a loader that returns rows: dataset.loader (docs/datasets.md)"),
    missing("data.sampler.*", "write a sampler: dataset.sampler (docs/datasets.md); its interface differs from verl's"),
    missing("data.datagen.*", "clients submit prompts while the run goes on (docs/client.md)"),
    missing("data.train_max_samples", "cut the file, or set learner.num_steps", -1),
    missing("data.val_max_samples", "cut the file", -1),
    missing("data.tokenizer", "the tokenizer is that of the model folder"),
    unneeded("data.tool_config_path", "it is rollout.agents.tools_file"),
    missing("data.image_key", "models with images are not trained; rows with images are refused", "images"),
    missing("data.video_key", "models with images are not trained; rows with videos are refused", "videos"),
    missing("data.audio_key", "models with sound are not trained; rows with sound are refused", "audios"),
    unneeded("data.image_patch_size", "models with images are not trained"),
    unneeded("data.return_*", "samples always have their messages and their tokens"),
    unneeded("data.use_shm", "files are read as they are needed"),
    unneeded("data.dataloader_num_workers", "the feed is one process"),
    missing("data.validation_shuffle", "every row is validated once", False),
    missing("data.trust_remote_code", "code of model folders is never run", False),
)  # fmt: skip

REWARD_KEYS: tuple[Key, ...] = (
    computed("custom_reward_function.path", "rollout.reward.function_file"),
    computed("custom_reward_function.name", "rollout.reward.function_name", "compute_score"),
    computed("custom_reward_function.reward_kwargs.*", "rollout.reward.function_kwargs"),
    alias("reward.custom_reward_function.*", "custom_reward_function.*"),
    computed(
        _RM + "reward_manager", f"rollout.reward.function_batch {_OVERLONG} rollout.reward.compat", "naive",
        "naive and prime score sample by sample; batch sets function_batch; dapo takes the overlong settings",
    ),
    alias("reward_manager.name", _RM + "reward_manager"),
    alias("reward.reward_manager.*", "reward_manager.*"),
    alias("reward.reward_kwargs.*", _RM + "reward_kwargs.*"),
    alias("reward.sandbox_fusion.*", _RM + "sandbox_fusion.*"),
    alias("reward.num_workers", _RM + "num_workers"),
    missing("reward_manager.source", "a class can be the reward function: rollout.reward.function_name", "register"),
    missing(
        "reward_manager.module.*", "a class can be the reward function: rollout.reward.function_name",
        "custom_reward_manager",
    ),
    computed(_RM + "reward_kwargs.max_resp_len", f"{_OVERLONG}.max_num_tokens"),
    computed(_RM + "reward_kwargs.overlong_buffer_cfg.enable", _OVERLONG, False),
    computed(
        _RM + "reward_kwargs.overlong_buffer_cfg.len", f"{_OVERLONG}.buffer_num_tokens",
        note="it shapes the rewards that are trained on; validation scores stay as they are",
    ),
    computed(_RM + "reward_kwargs.overlong_buffer_cfg.penalty_factor", f"{_OVERLONG}.factor", 1.0),
    unneeded(_RM + "reward_kwargs.overlong_buffer_cfg.log", "the reward before and after shaping is always logged"),
    alias(_RM + "overlong_buffer.enable", _RM + "reward_kwargs.overlong_buffer_cfg.enable"),
    alias(_RM + "overlong_buffer.len", _RM + "reward_kwargs.overlong_buffer_cfg.len"),
    alias(_RM + "overlong_buffer.penalty_factor", _RM + "reward_kwargs.overlong_buffer_cfg.penalty_factor"),
    alias(_RM + "overlong_buffer.log", _RM + "reward_kwargs.overlong_buffer_cfg.log"),
    missing(_RM + "reward_kwargs.*", "give your reward function its arguments: rollout.reward.function_kwargs"),
    computed(_RM + "enable", "learner.reward_model", False),
    computed(
        _RM + "model.path", "learner.reward_model.path", "~/models/FsfairX-LLaMA3-RM-v0.1",
        "its scores replace the rewards of rules, as in verl; they are computed in the learner",
    ),
    alias("reward.reward_model.enable", _RM + "enable"),
    alias("reward.reward_model.model_path", _RM + "model.path"),
    alias("reward.reward_model.*", _RM + "*"),
    computed(_RM + "model.input_tokenizer", "learner.reward_model.tokenizer", ""),
    missing(_RM + "model.trust_remote_code", "code of model folders is never run", False),
    unneeded(_RM + "model.*", _RM_GPUS),
    missing(_RM + "sandbox_fusion.url", "the reward `code` runs tests in a sandbox on the rollout server"),
    unneeded(_RM + "sandbox_fusion.*", "the reward `code` has its own limits (docs/rewards.md)"),
    missing(_RM + "max_length", "the reward model reads whole samples"),
    unneeded(_RM + "use_reward_loop", "rewards are always computed while other samples are generated"),
    unneeded(_RM + "launch_reward_fn_async", "rewards are always computed while other samples are generated"),
    computed(_RM + "num_workers", "rollout.reward.num_processes", 1),
    unneeded(_RM + "rollout.*", _RM_GPUS),
    missing(_RM + "reward_loop_*", "a class can be the reward function: rollout.reward.function_name", "register"),
    unneeded(_RM + "*", _RM_GPUS),
    missing("reward.*", "rewards are configured in rollout.reward and learner.reward_model"),
)  # fmt: skip

TRAINER_KEYS: tuple[Key, ...] = (
    computed(
        "trainer.n_gpus_per_node", "learner.policy.num_ranks learner.policy.gpus_per_rank rollout.num_servers", 8,
        "GPUs are divided: about half for engines, the rest for training; `penstock plan` says whether the models fit",
    ),
    computed(
        "trainer.nnodes", "learner.policy.num_ranks rollout.num_servers", 1,
        "`penstock up` starts one machine; on several use the chart, or Ray and `penstock rollout` (docs/deploy.md)",
    ),
    computed("rollout.n_gpus_per_node", "rollout.num_servers"),
    computed("rollout.nnodes", "rollout.num_servers"),
    alias("actor_rollout_ref.rollout.n_gpus_per_node", "rollout.n_gpus_per_node"),
    alias("actor_rollout_ref.rollout.nnodes", "rollout.nnodes"),
    missing(
        "trainer.v1.trainer_mode", "the import is on-policy; --max-staleness N lets both sides overlap", "sync",
    ),
    unneeded("trainer.v1.*", "engines and training always run side by side: replay.max_staleness, stale_policy"),
    unneeded("trainer.use_v1", "verl's own implementation"),
    missing("skip.*.enable", "`penstock queue export` and `import` keep and repeat samples", False),
    unneeded("skip.*", "`penstock queue export` writes samples"),
    missing("distillation.enabled", "write a step with a teacher: examples/own_steps/distillation.py", False),
    unneeded("distillation.*", "only used with distillation.enabled"),
    unneeded("model_engine.*", "the learner always shards by FSDP2"),
    computed("trainer.total_epochs", "dataset.epochs", 30),
    computed("trainer.total_training_steps", "learner.num_steps"),
    computed("trainer.critic_warmup", "learner.critic_warmup_steps", 0),
    computed(
        "trainer.save_freq", "learner.checkpoint.every_steps", -1,
        "ours always saves: without a number, every 25 steps",
    ),
    computed("trainer.test_freq", "dataset.validation.every_steps", -1, "ours also validates after the last step"),
    computed("trainer.val_before_train", "dataset.validation.before_train", True),
    computed("trainer.val_only", "dataset.validation.only", False),
    computed("trainer.resume_mode", "learner.checkpoint.resume", "auto"),
    missing(
        "trainer.resume_from_path",
        "verl's checkpoints cannot be read: merge one to a Hugging Face folder and set model.path",
    ),
    computed("trainer.logger", "learner.loggers", ["console", "wandb"]),
    same("trainer.project_name", "learner.wandb.project", "verl_examples"),
    computed(
        "trainer.experiment_name", "run", "gsm8k", "the name has lower-case letters, digits, - and _ only",
    ),
    computed(
        "trainer.default_local_dir", "run_dir", "",
        "the run's folder, with its checkpoints, is run_dir/run",
    ),
    computed(
        "trainer.max_actor_ckpt_to_keep", "learner.checkpoint.keep",
        note="without a number verl keeps all checkpoints, ours the last 2",
    ),
    unneeded("trainer.max_critic_ckpt_to_keep", "a checkpoint has the policy and the critic"),
    unneeded("trainer.balance_batch", "sequences are always balanced over ranks by their tokens"),
    unneeded("trainer.ray_wait_register_center_timeout", "ranks are waited for by learner.rank_timeout_s"),
    unneeded("trainer.log_val_generations", "`penstock samples` shows texts; learner.samples sets their tables"),
    unneeded("trainer.rollout_data_dir", "samples are in samples.jsonl of the run's folder"),
    unneeded("trainer.validation_data_dir", "the scores of validations are in the run's folder and in every logger"),
    unneeded("trainer.use_legacy_worker_impl", "verl's own implementation"),
    missing("trainer.default_hdfs_dir", "mount the storage and set run_dir"),
    missing("trainer.del_local_ckpt_after_load", "old checkpoints are deleted by learner.checkpoint.keep", False),
    missing("trainer.esi_redundant_time", "SIGTERM makes the learner save and end", 0),
    missing("trainer.device", "training needs NVIDIA GPUs, or CPUs for tiny models", "cuda", "cpu"),
    alias("trainer.profile_steps", "global_profiler.steps"),
    computed("global_profiler.steps", "learner.profile.steps"),
    missing("global_profiler.tool", _PROFILE, "torch"),
    unneeded("global_profiler.*", _PROFILE),
    unneeded("*.profiler.*", _PROFILE),
    computed(
        "actor_rollout_ref.actor.megatron.context_parallel_size", "learner.sequence_parallel", 1,
        "sequences are shared by Ulysses, which divides attention heads",
    ),
    computed(
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
        "learner.router.aux_loss_coefficient",
    ),
    missing(
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff", "routers have no z-loss", 0,
        0.0,
    ),
    unneeded(
        "*.megatron.override_transformer_config.recompute_*", "learner.activation_checkpointing recomputes layers",
    ),
    unneeded("*.megatron.*offload*", "the learner does not share its GPUs with an engine; see learner.cpu_offload"),
    unneeded("*.megatron.*", _MEGATRON),
    unneeded("*.veomni.*", "the learner shards by FSDP2"),
    unneeded("ray_kwargs.*", "Ray is started by `penstock up`, or joined by learner.ray_address"),
    unneeded("ray_init.*", "Ray is started by `penstock up`, or joined by learner.ray_address"),
    missing("transfer_queue.enable", "batches travel through Redis", False),
    unneeded("transfer_queue.*", "batches travel through Redis"),
)  # fmt: skip


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


_ACTOR = "actor_rollout_ref.actor."
_OPTIM = "actor_rollout_ref.actor.optim."
_MODEL = "actor_rollout_ref.model."
_CORRECTION = "algorithm.rollout_correction."
_OWN_GPUS = "the learner does not share its GPUs with an engine; if a model does not fit, set learner.cpu_offload"
_ONE_BUDGET = "log-probs use the budget of training, learner.micro_batch_tokens"
_SHARED = "the critic shares this setting with the policy"
_OWN_LOSS = "only used by a loss that has no counterpart; write it as your own loss (docs/algorithms.md)"
_PACKED = "sequences are always packed without padding"


def _share(value: Any) -> float:
    return 1.0 if value else 0.0


def _number(value: Any) -> Any:
    return 0.0 if value is None else value


POLICY_KEYS: tuple[Key, ...] = (
    computed(_MODEL + "path", "model.path", "~/models/deepseek-llm-7b-chat"),
    same(_OPTIM + "lr", "learner.lr", 1e-6),
    same(_OPTIM + "weight_decay", "learner.weight_decay", 0.01),
    same(_OPTIM + "betas", "learner.betas", [0.9, 0.999]),
    same(_OPTIM + "min_lr_ratio", "learner.min_lr_share", 0.0, _number),
    same(_ACTOR + "grad_clip", "learner.max_grad_norm", 1.0),
    alias(_OPTIM + "clip_grad", _ACTOR + "grad_clip"),
    computed(_OPTIM + "lr_warmup_steps", "learner.warmup_steps", -1),
    computed(
        _OPTIM + "lr_warmup_steps_ratio", "learner.warmup_steps", 0.0,
        "our warm-up is a number of steps: the ratio is multiplied by the steps of the run",
    ),
    computed(_OPTIM + "lr_scheduler_type", "learner.lr_schedule", "constant"),
    alias(_OPTIM + "warmup_style", _OPTIM + "lr_scheduler_type"),
    alias(_OPTIM + "lr_decay_style", _OPTIM + "lr_scheduler_type"),
    unneeded(_OPTIM + "total_training_steps", "it is learner.num_steps"),
    missing(_OPTIM + "num_cycles", "the cosine schedule has half a cycle", 0.5),
    missing(_OPTIM + "optimizer", "the optimizer is AdamW", "AdamW", "adam", "adamw"),
    unneeded(_OPTIM + "optimizer_impl", "the optimizer is torch's AdamW"),
    unneeded(_OPTIM + "override_optimizer_config*", _OWN_GPUS),
    missing(_OPTIM + "min_lr", "set learner.min_lr_share, which is a share of lr", 0.0),
    missing(_OPTIM + "lr_warmup_init", "the warm-up starts at 0", 0.0),
    unneeded(_OPTIM + "muon_*", "the optimizer is AdamW"),
    unneeded(_OPTIM + "*_dtype", "the optimizer's state has learner.master_dtype"),
    missing(_OPTIM + "zero_indexed_step", "the first step of a warm-up has the rate 0", True),
    missing(
        _OPTIM + "*", "the optimizer is AdamW with one schedule for warm-up and decay", "constant", "exponential",
        False,
    ),
    computed(
        _ACTOR + "ppo_mini_batch_size", "learner.minibatches_per_step", 256,
        "ours is a number of parts: data.train_batch_size / ppo_mini_batch_size",
    ),
    computed(
        _ACTOR + "ppo_micro_batch_size_per_gpu", "learner.micro_batch_tokens",
        note="ours is a number of tokens: sequences x (max_prompt_length + max_response_length)",
    ),
    computed(
        _ACTOR + "ppo_micro_batch_size", "learner.micro_batch_tokens",
        note="ours is a number of tokens per rank: sequences / GPUs x (max_prompt_length + max_response_length)",
    ),
    computed(
        _ACTOR + "use_dynamic_bsz", "learner.micro_batch_tokens", False,
        "micro-batches always have a budget of tokens, as with verl's dynamic batches",
    ),
    computed(_ACTOR + "ppo_max_token_len_per_gpu", "learner.micro_batch_tokens", 16384),
    same(_ACTOR + "ppo_epochs", "learner.epochs_per_step", 1),
    computed(_ACTOR + "clip_ratio", "learner.algorithm.loss.clip_low learner.algorithm.loss.clip_high", 0.2),
    computed(_ACTOR + "clip_ratio_low", "learner.algorithm.loss.clip_low", 0.2),
    computed(_ACTOR + "clip_ratio_high", "learner.algorithm.loss.clip_high", 0.2),
    same(_ACTOR + "clip_ratio_c", "learner.algorithm.loss.dual_clip", 3.0),
    computed(_ACTOR + "policy_loss.loss_mode", "learner.algorithm.loss.name", "vanilla"),
    computed(_ACTOR + "policy_loss.clip_cov_ratio", "learner.algorithm.loss.cov_share", 0.0002),
    computed(_ACTOR + "policy_loss.kl_cov_ratio", "learner.algorithm.loss.cov_share", 0.0002),
    same(_ACTOR + "policy_loss.clip_cov_lb", "learner.algorithm.loss.cov_low", 1.0),
    same(_ACTOR + "policy_loss.clip_cov_ub", "learner.algorithm.loss.cov_high", 5.0),
    same(_ACTOR + "policy_loss.ppo_kl_coef", "learner.algorithm.loss.cov_kl_coefficient", 0.1),
    computed(_ACTOR + "policy_loss.dro_beta", "learner.algorithm.loss.dro_beta"),
    missing(_ACTOR + "policy_loss.*", _OWN_LOSS),
    same(_ACTOR + "tau_pos", "learner.algorithm.loss.tau_positive", 1.0),
    same(_ACTOR + "tau_neg", "learner.algorithm.loss.tau_negative", 1.05),
    computed(
        _ACTOR + "loss_agg_mode", "learner.algorithm.loss.aggregation learner.algorithm.loss.constant_length",
        "token-mean", "the denominators count the whole mini-batch over all ranks and micro-batches",
    ),
    computed(_ACTOR + "loss_scale_factor", "learner.algorithm.loss.constant_length"),
    same(_ACTOR + "entropy_coeff", "learner.algorithm.loss.entropy_coefficient", 0),
    computed(_ACTOR + "use_kl_loss", "learner.algorithm.kl.placement", False),
    computed(_ACTOR + "kl_loss_coef", "learner.algorithm.kl.coefficient learner.algorithm.kl.loss_coefficient", 0.001),
    computed(_ACTOR + "kl_loss_type", "learner.algorithm.kl.penalty learner.algorithm.kl.loss_penalty", "low_var_kl"),
    computed(_ACTOR + "ulysses_sequence_parallel_size", "learner.sequence_parallel", 1),
    alias(_ACTOR + "fsdp_config.ulysses_sequence_parallel_size", _ACTOR + "ulysses_sequence_parallel_size"),
    computed(_ACTOR + "fsdp_config.model_dtype", "learner.master_dtype", "fp32"),
    computed(_ACTOR + "fsdp_config.offload_policy", "learner.cpu_offload", False),
    unneeded(_ACTOR + "fsdp_config.param_offload", _OWN_GPUS),
    unneeded(_ACTOR + "fsdp_config.optimizer_offload", _OWN_GPUS),
    missing(_ACTOR + "fsdp_config.fsdp_size", "each role is sharded over all of its ranks", -1),
    missing(
        _ACTOR + "fsdp_config.full_determinism", "runs are reproducible by `seed`, but not bit by bit on GPUs",
        False,
    ),
    unneeded(_ACTOR + "fsdp_config.*", "FSDP2 is set up by learner.compute_dtype, master_dtype and placement"),
    missing(_ACTOR + "qat.enable", "weights are trained without quantization", False),
    unneeded(_ACTOR + "qat.*", "only used with qat.enable"),
    unneeded(_ACTOR + "pad_to_length", _PACKED),
    unneeded(_ACTOR + "strategy", "the learner always shards by FSDP2"),
    unneeded(_ACTOR + "use_torch_compile", "verl compiles the entropy; learner.compile compiles the layers"),
    unneeded(_ACTOR + "entropy_*", "log-probs and entropy are computed in chunks: learner.logprob_chunk_tokens"),
    unneeded(_ACTOR + "calculate_entropy", "the entropy is always measured"),
    unneeded(_ACTOR + "use_remove_padding", _PACKED),
    unneeded(_ACTOR + "use_fused_kernels", "log-probs are computed in chunks: learner.logprob_chunk_tokens"),
    unneeded(_ACTOR + "rollout_n", "it is dataset.num_samples"),
    same(_ACTOR + "shuffle", "learner.shuffle_minibatches", False),
    same(_ACTOR + "data_loader_seed", "learner.shuffle_seed", 42),
    missing(
        _ACTOR + "checkpoint.save_contents",
        "checkpoints have model, optimizer and state; `penstock export` writes a Hugging Face folder",
        ["model", "optimizer", "extra"],
    ),
    unneeded(_ACTOR + "checkpoint.*", "a checkpoint is always loaded whole"),
    computed(
        _ACTOR + "router_replay.mode", "learner.router.replay", "disabled",
        "R3 replays the engine's experts, as ours does; R2 replays those of the learner's own first pass",
    ),
    missing(_ACTOR + "router_replay.*", "routers are replayed from the samples, not from files"),
    missing(_ACTOR + "freeze_vision_tower", "models with images are not trained", False),
    unneeded(_ACTOR + "use_prefix_grouper", "what samples begin with is computed once (learner.share_prefixes)", False),
    missing(_ACTOR + "calculate_sum_pi_squared", "it belongs to an advantage without counterpart", False),
    unneeded(_ACTOR + "sum_pi_squared_checkpointing", "it belongs to an advantage without counterpart"),
    unneeded(_ACTOR + "load_weight", "the weights are always loaded"),
    # The reference.
    unneeded("actor_rollout_ref.ref.log_prob_*", _ONE_BUDGET),
    unneeded("ref.log_prob_*", _ONE_BUDGET),
    unneeded("actor_rollout_ref.ref.ulysses_sequence_parallel_size", "the reference takes whole sequences"),
    unneeded("actor_rollout_ref.ref.fsdp_config.*", "the reference has GPUs, or parts of GPUs, of its own"),
    computed("actor_rollout_ref.ref.model.path", "learner.reference.path"),
    unneeded("actor_rollout_ref.ref.*", "the reference is set up by learner.reference"),
    # The model.
    same(_MODEL + "enable_gradient_checkpointing", "learner.activation_checkpointing", True, _share),
    computed(_MODEL + "lora_rank", "learner.lora.rank", 0),
    computed(_MODEL + "lora_alpha", "learner.lora.alpha", 16),
    computed(_MODEL + "target_modules", "learner.lora.target_modules", "all-linear"),
    alias(_MODEL + "lora.rank", _MODEL + "lora_rank"),
    alias(_MODEL + "lora.alpha", _MODEL + "lora_alpha"),
    missing(
        _MODEL + "lora.*", "adapters are plain LoRA on the layers of the Hugging Face model, without dropout",
        "lora", 0.0,
    ),
    missing(_MODEL + "lora_adapter_path", "training starts with a new adapter; merge yours into the model first"),
    missing(_MODEL + "exclude_modules", "name the layers to adapt in learner.lora.target_modules"),
    unneeded(_MODEL + "use_remove_padding", _PACKED),
    unneeded(_MODEL + "use_shm", "models are loaded from the page cache"),
    unneeded(_MODEL + "use_fused_kernels", "log-probs are computed in chunks: learner.logprob_chunk_tokens"),
    unneeded(_MODEL + "fused_kernel_options.*", "log-probs are computed in chunks: learner.logprob_chunk_tokens"),
    unneeded(_MODEL + "use_liger", "log-probs are computed in chunks, and learner.compile fuses the layers"),
    missing(_MODEL + "trust_remote_code", "code of model folders is never run; docs/models.md lists the models", False),
    missing(_MODEL + "external_lib", "models are those of transformers; docs/models.md lists them"),
    missing(_MODEL + "custom_chat_template", "put the template into the model folder's tokenizer"),
    missing(_MODEL + "tokenizer_path", "the tokenizer is that of the model folder"),
    missing(_MODEL + "hf_config_path", "the config is that of the model folder"),
    missing(_MODEL + "override_config*", "change config.json of the model folder", {}),
    missing(
        _MODEL + "enable_activation_offload*", "activations are recomputed; lower learner.micro_batch_tokens", False,
    ),
    missing(_MODEL + "tiled_mlp.*", "lower learner.micro_batch_tokens if activations do not fit", False, 4),
    missing(
        _MODEL + "mtp*", "heads that predict several tokens are not trained", False, 0.1, "EAGLE", 2, 3, 4, "mtp", 1
    ),
    unneeded(_MODEL + "torch_dtype", "it is model.dtype"),
    # The critic.
    same("critic.optim.lr", "learner.critic.lr", 1e-5),
    computed("critic.model.path", "learner.critic.path", "~/models/deepseek-llm-7b-chat"),
    same("critic.cliprange_value", "learner.algorithm.value_loss.clip", 0.5),
    computed("critic.loss_agg_mode", "learner.algorithm.value_loss.aggregation"),
    computed("critic.enable", "learner.critic"),
    unneeded("critic.model.enable_gradient_checkpointing", _SHARED, True),
    missing("critic.optim.lr_warmup_steps_ratio", _SHARED, 0.0),
    missing("critic.optim.lr_warmup_steps", _SHARED, -1),
    missing("critic.optim.weight_decay", _SHARED, 0.01),
    missing("critic.grad_clip", _SHARED, 1.0),
    missing("critic.ppo_epochs", _SHARED),
    missing("critic.ppo_mini_batch_size", _SHARED),
    unneeded("critic.ppo_micro_batch_size*", "the critic has the policy's budget, learner.micro_batch_tokens"),
    unneeded("critic.*max_token_len_per_gpu", "the critic has the policy's budget, learner.micro_batch_tokens"),
    unneeded("critic.forward_micro_batch_size*", "the critic has the policy's budget, learner.micro_batch_tokens"),
    unneeded("critic.use_dynamic_bsz", "micro-batches always have a budget of tokens"),
    missing("critic.ulysses_sequence_parallel_size", "the critic takes whole sequences", 1),
    missing("critic.shuffle", "mini-batches are those of the policy", False),
    missing("critic.model.lora_rank", "the critic is trained as a whole", 0),
    unneeded("critic.megatron.*", "the learner shards by FSDP2"),
    missing("critic.model.trust_remote_code", "code of model folders is never run", False),
    unneeded("critic.*", "the critic is set up by learner.critic, and otherwise as the policy"),
    # The algorithm.
    computed("algorithm.gdpo_reward_keys", "learner.algorithm.advantage.reward_keys"),
    computed("algorithm.gdpo_reward_weights", "learner.algorithm.advantage.reward_weights"),
    computed("algorithm.adv_estimator", "learner.algorithm.advantage.name", "gae"),
    same("algorithm.norm_adv_by_std_in_grpo", "learner.algorithm.advantage.normalize_by_std", True),
    same("algorithm.gamma", "learner.algorithm.advantage.gamma", 1.0),
    same("algorithm.lam", "learner.algorithm.advantage.lam", 1.0),
    computed("algorithm.use_kl_in_reward", "learner.algorithm.kl.placement", False),
    computed("algorithm.kl_penalty", "learner.algorithm.kl.penalty", "kl"),
    computed("algorithm.kl_ctrl.kl_coef", "learner.algorithm.kl.coefficient", 0.001),
    same("algorithm.kl_ctrl.type", "learner.algorithm.kl.controller", "fixed"),
    same("algorithm.kl_ctrl.target_kl", "learner.algorithm.kl.target", 0.1),
    same("algorithm.kl_ctrl.horizon", "learner.algorithm.kl.horizon", 10000),
    computed("algorithm.filter_groups.enable", "replay.dynamic_sampling", False),
    computed(
        "algorithm.filter_groups.metric", "replay.dynamic_sampling",
        note="groups are compared by their rewards, whatever the metric",
    ),
    unneeded("algorithm.filter_groups.max_inflight_gen_batches", "prompts are admitted one by one"),
    missing(
        "algorithm.filter_groups.max_num_gen_batches",
        "new prompts are admitted one by one until the batch is full; learner.batch_timeout_s bounds the wait", 0,
    ),
    computed(_CORRECTION + "rollout_is", "learner.algorithm.correction.mode learner.algorithm.correction.weight"),
    computed(_CORRECTION + "rollout_is_threshold", "learner.algorithm.correction.cap", 2.0),
    missing(
        _CORRECTION + "rollout_is_batch_normalize", "weights are truncated, but not normalized over the batch",
        False,
    ),
    computed(_CORRECTION + "rollout_rs", "learner.algorithm.correction.rejection"),
    computed(
        _CORRECTION + "rollout_rs_threshold",
        "learner.algorithm.correction.rejection_low learner.algorithm.correction.rejection_high",
    ),
    computed(_CORRECTION + "rollout_rs_threshold_lower", "learner.algorithm.correction.rejection_low"),
    missing(_CORRECTION + "rollout_token_veto_threshold", "use learner.algorithm.correction.rejection: token"),
    computed(_CORRECTION + "bypass_mode", "learner.algorithm.correction.mode", False),
    alias(_CORRECTION + "bypass_old_logprob_for_rollout", _CORRECTION + "bypass_mode"),
    computed(_CORRECTION + "loss_type", "learner.algorithm.loss.name", "ppo_clip"),
    computed(_CORRECTION + "use_policy_gradient", "learner.algorithm.loss.name", False),
    missing("algorithm.use_pf_ppo", "samples are not weighted by their reward before training", False),
    missing("algorithm.pf_ppo.*", "samples are not weighted by their reward before training", "pow", 2.0),
)  # fmt: skip
