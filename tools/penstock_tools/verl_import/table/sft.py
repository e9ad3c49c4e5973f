"""Keys of verl's supervised trainers, which `penstock sft` replaces: `sft_trainer` and the older `fsdp_sft_trainer`."""

from __future__ import annotations

from penstock_tools.verl_import.table.key import Key, alias, computed, missing, same, unneeded

_EPOCHS = "training ends with its files: set sft.epochs"
_FSDP = "the model is sharded by FSDP2"
_CODE = "code of model folders is never run"
_PACKED = "rows are always packed without padding"
_RESUME = "verl's checkpoints cannot be read: merge one to a Hugging Face folder and set model.path"


def _optimizer(lr: float, betas: list[float], warmup_ratio: float, schedule: str) -> tuple[Key, ...]:
    return (
        same("optim.lr", "learner.lr", lr),
        same("optim.betas", "learner.betas", betas),
        same("optim.weight_decay", "learner.weight_decay", 0.01),
        same("optim.clip_grad", "learner.max_grad_norm", 1.0),
        same("optim.min_lr_ratio", "learner.min_lr_share", 0.0),
        computed("optim.lr_warmup_steps", "learner.warmup_steps", -1),
        computed(
            "optim.lr_warmup_steps_ratio", "learner.warmup_steps", warmup_ratio,
            "our warm-up is a number of steps: the ratio is multiplied by the steps of the training",
        ),
        alias("optim.warmup_steps_ratio", "optim.lr_warmup_steps_ratio"),
        computed("optim.lr_scheduler_type", "learner.lr_schedule", schedule),
        alias("optim.lr_scheduler", "optim.lr_scheduler_type"),
        alias("optim.warmup_style", "optim.lr_scheduler_type"),
        missing("optim.num_cycles", "the cosine schedule has half a cycle", 0.5),
        missing("optim.zero_indexed_step", "the first step of a warm-up has the rate 0", True),
        missing("optim.optimizer", "the optimizer is AdamW", "AdamW", "adam", "adamw"),
        unneeded("optim.*", "the optimizer is AdamW with one schedule for warm-up and decay"),
    )  # fmt: skip


_SHARED: tuple[Key, ...] = (
    computed("data.train_files", "sft.file", "~/data/gsm8k/train.parquet"),
    computed("data.val_files", "sft.validation.file"),
    computed("data.train_batch_size", "sft.batch_size", 256),
    computed("data.max_length", "sft.max_tokens", 1024),
    computed("data.truncation", "sft.too_long", "error"),
    computed(
        "data.micro_batch_size_per_gpu", "learner.micro_batch_tokens", 4,
        "ours is a number of tokens: rows x max_length",
    ),
    alias("data.micro_batch_size", "data.micro_batch_size_per_gpu"),
    computed("data.max_token_len_per_gpu", "learner.micro_batch_tokens", 8192),
    computed("data.apply_chat_template_kwargs.*", "rollout.prompt.template_arguments"),
    missing("data.apply_chat_template_kwargs", "", {}),
    missing("data.train_max_samples", "cut the file", -1),
    missing("data.val_max_samples", "cut the file", -1),
    missing("data.custom_cls.*", "write the rows to a file: docs/sft.md#rows"),
    missing("data.chat_template", "put the template into the model folder's tokenizer"),
    missing(
        "data.*enable_thinking*", "set rollout.prompt.template_arguments for all rows", "enable_thinking", "none"
    ),
    missing(
        "data.ignore_input_ids_mismatch", "a template that changes earlier turns makes several sequences of a row",
        False,
    ),
    unneeded("data.pad_mode", _PACKED),
    unneeded("data.balance_dp_token", "rows are always balanced over ranks by their tokens"),
    unneeded("data.*", "files are read before the first step"),
    unneeded("use_remove_padding", _PACKED),
    computed("model.path", "model.path", "~/models/gemma-1.1-7b-it"),
    alias("model.partial_pretrain", "model.path"),
    computed("model.lora_rank", "learner.lora.rank", 0),
    computed("model.lora_alpha", "learner.lora.alpha", 16),
    computed("model.target_modules", "learner.lora.target_modules", "all-linear"),
    computed("model.enable_gradient_checkpointing", "learner.activation_checkpointing", True),
    missing("model.trust_remote_code", _CODE, False),
    missing("model.external_lib", "models are those of transformers; docs/models.md lists them"),
    unneeded("model.fsdp_config.*", _FSDP),
    unneeded("model.*", "the model is set up by learner, and its tokenizer is that of the folder"),
    computed("engine.ulysses_sequence_parallel_size", "learner.sequence_parallel", 1),
    alias("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
    unneeded("engine.*", _FSDP),
    unneeded("engine", _FSDP),
    unneeded("optim", "the optimizer is AdamW"),
    computed("trainer.total_epochs", "sft.epochs", 4),
    missing("trainer.total_training_steps", _EPOCHS),
    computed("trainer.default_local_dir", "--out"),
    computed("trainer.experiment_name", "run", "test"),
    computed("trainer.project_name", "learner.wandb.project", "gsm8k-sft"),
    computed("trainer.logger", "learner.loggers", ["console", "wandb"]),
    same("trainer.seed", "seed", 1),
    computed("trainer.save_freq", "learner.checkpoint.every_steps", -1, "ours always saves at the end"),
    computed("trainer.test_freq", "sft.validation.every_steps", -1, "ours also validates before and after training"),
    computed("trainer.max_ckpt_to_keep", "learner.checkpoint.keep"),
    computed("trainer.resume_mode", "learner.checkpoint.resume", "auto"),
    missing("trainer.resume_from_path", _RESUME),
    missing("trainer.default_hdfs_dir", "mount the storage and give the command its folder"),
    missing("trainer.nnodes", "start torchrun on every machine", 1),
    computed("trainer.n_gpus_per_node", "--nproc-per-node", 8),
    missing("trainer.device", "training needs NVIDIA GPUs, or CPUs for tiny models", "cuda"),
    unneeded("trainer.*", "set up by learner.checkpoint and learner.profile"),
    unneeded("checkpoint.*", "checkpoints have model, optimizer and state; the result is a Hugging Face folder"),
    unneeded("profiler.*", "set learner.profile"),
)  # fmt: skip

SFT_KEYS: tuple[Key, ...] = (
    *_optimizer(1e-3, [0.9, 0.999], 0.0, "constant"),
    computed("data.messages_key", "sft.columns.messages", "messages"),
    computed("data.tools_key", "sft.columns.tools", "tools"),
    computed("data.use_dynamic_bsz", "learner.micro_batch_tokens", True),
    *_SHARED,
)
FSDP_SFT_KEYS: tuple[Key, ...] = (
    *_optimizer(1e-5, [0.9, 0.95], 0.1, "cosine"),
    computed("data.multiturn.enable", "sft.columns.messages", False),
    computed("data.multiturn.messages_key", "sft.columns.messages", "messages"),
    computed("data.multiturn.tools_key", "sft.columns.tools", "tools"),
    alias("data.messages_key", "data.multiturn.messages_key"),
    alias("data.tools_key", "data.multiturn.tools_key"),
    computed("data.prompt_key", "sft.columns.prompt", "question"),
    computed("data.response_key", "sft.columns.response", "answer"),
    computed("data.prompt_dict_keys", "sft.columns.prompt"),
    computed("data.response_dict_keys", "sft.columns.response"),
    computed("data.use_dynamic_bsz", "learner.micro_batch_tokens", False),
    *_SHARED,
)
