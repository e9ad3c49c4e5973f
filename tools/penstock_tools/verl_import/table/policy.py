"""Keys of the policy, the reference, the critic and the algorithm."""

from __future__ import annotations

from typing import Any

from penstock_tools.verl_import.table.key import Key, alias, computed, missing, same, unneeded

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
