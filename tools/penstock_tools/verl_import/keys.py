"""The table of verl's keys: the source of the import, of its report and of docs/verl-keys.md; and the values of a run.

The keys of training are in training_keys.py. Here are those of the programs that `penstock generate`, `evaluate` and
`sft` replace.
"""

from __future__ import annotations

import fnmatch
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.config.run import RunConfig
from penstock_tools.verl_import.hydra import HydraConfig
from penstock_tools.verl_import.training_keys import (
    DATA_KEYS,
    POLICY_KEYS,
    REWARD_KEYS,
    ROLLOUT_KEYS,
    TRAINER_KEYS,
    Key,
    alias,
    computed,
    missing,
    same,
    unneeded,
)

_RAY = "the command is one process and starts no Ray"

GENERATION_KEYS: tuple[Key, ...] = (
    computed("model.path", "model.path", "~/models/Qwen2-7B-Instruct"),
    computed("data.path", "dataset.file", "~/data/rlhf/math/test.parquet"),
    computed("data.prompt_key", "dataset.columns.prompt", "prompt"),
    computed("data.n_samples", "dataset.num_samples", 5),
    computed("data.output_path", "--output", "generated.parquet"),
    unneeded("data.batch_size", "prompts are answered as the engine has room"),
    computed("rollout.name", "rollout.engine.name", "vllm"),
    computed("rollout.temperature", "dataset.temperature", 1.0),
    computed("rollout.top_p", "dataset.top_p", 0.7),
    computed("rollout.top_k", "dataset.top_k", 50),
    computed("rollout.ignore_eos", "dataset.ignore_eos", False),
    computed("rollout.prompt_length", "rollout.prompt.max_tokens", 1536),
    computed("rollout.response_length", "dataset.max_tokens", 512),
    computed("rollout.max_model_len", "rollout.engine.max_model_len"),
    computed("rollout.max_num_seqs", "rollout.engine.max_num_seqs", 1024),
    computed("rollout.tensor_model_parallel_size", "rollout.engine.tensor_parallel_size", 1),
    computed("rollout.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization", 0.5),
    computed("rollout.enforce_eager", "rollout.engine.enforce_eager", True),
    computed("rollout.dtype", "model.dtype", "bfloat16"),
    missing("rollout.n", "the number of samples is data.n_samples", 1),
    missing("rollout.do_sample", "set the temperature to 0 for greedy decoding", True),
    missing("rollout.data_parallel_size", "start one command for each part of the file", 1),
    unneeded("rollout.*", "the engine works with its own settings: rollout.engine"),
    missing("model.trust_remote_code", "code of model folders is never run", False),
    missing("model.external_lib", "models are those of transformers; docs/models.md lists them"),
    missing("trainer.nnodes", "the command runs on one machine; start one for each part of the file", 1),
    unneeded("trainer.n_gpus_per_node", "the command starts one engine on rollout.engine.tensor_parallel_size GPUs", 8),
    missing("trainer.device", "engines need NVIDIA GPUs, or CPUs for tiny models", "cuda", "cpu"),
    unneeded("actor.*", "nothing is trained"),
    unneeded("ray_kwargs.*", _RAY),
)

EVALUATION_KEYS: tuple[Key, ...] = (
    computed("data.path", "dataset.file", "generated.parquet"),
    computed("data.response_key", "--response-column", "responses"),
    unneeded("data.prompt_key", "the prompt is copied as it is"),
    computed("data.data_source_key", "dataset.columns.data_source", "data_source"),
    computed("data.reward_model_key", "dataset.columns.ground_truth", "reward_model"),
    computed("custom_reward_function.path", "rollout.reward.function_file"),
    computed("custom_reward_function.name", "rollout.reward.function_name", "compute_score"),
    computed("custom_reward_function.reward_kwargs.*", "rollout.reward.function_kwargs"),
    unneeded("ray_kwargs.*", _RAY),
)


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


# ── looking up ──

TRAINING_KEYS = (*TRAINER_KEYS, *DATA_KEYS, *REWARD_KEYS, *ROLLOUT_KEYS, *POLICY_KEYS)
"""In the order in which they are looked up: a name before its patterns, and narrow patterns before wide ones."""
KEYS_BY_PROGRAM: dict[str, tuple[Key, ...]] = {
    "ppo": TRAINING_KEYS,
    "dapo": TRAINING_KEYS,
    "generation": GENERATION_KEYS,
    "eval": EVALUATION_KEYS,
    "sft": SFT_KEYS,
    "fsdp_sft": FSDP_SFT_KEYS,
}


@functools.cache
def find_key(program: str, name: str) -> Key | None:
    """The row of a key: its own, or that of the first pattern it matches. None: the table does not have it."""
    rows = KEYS_BY_PROGRAM[program]
    exact = next((row for row in rows if row.verl == name), None)
    return exact or next((row for row in rows if "*" in row.verl and fnmatch.fnmatchcase(name, row.verl)), None)


def canonical_name(program: str, name: str) -> str:
    """The name of a key in the table, for one that is given by an older or newer name."""
    row = find_key(program, name)
    if row is None or not row.alias_of:
        return name
    stem = row.verl.removesuffix("*")
    return canonical_name(program, row.alias_of.removesuffix("*") + (name[len(stem) :] if stem != row.verl else ""))


def default_of(program: str, name: str) -> object:
    row = find_key(program, name)
    return None if row is None else row.default


# ── the values of a run ──


@dataclass
class Findings:
    """What the user should know: each entry is a verl key, its value, and a sentence."""

    changed: list[tuple[str, Any, str]] = field(default_factory=list)
    missing: list[tuple[str, Any, str]] = field(default_factory=list)
    unneeded: list[tuple[str, Any, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    num_same: int = 0
    """Keys that mean the same here, or ask for nothing."""

    @property
    def num_keys(self) -> int:
        return self.num_same + len(self.changed) + len(self.missing) + len(self.unneeded)


class Values:
    """verl's values by key, and our fields as they are set."""

    def __init__(self, config: HydraConfig, program: str) -> None:
        self.program = program
        self.given: dict[str, Any] = {}
        self.original: dict[str, str] = {}
        """The name under which each key was given."""
        self.fields: dict[str, Any] = {}
        """Our configuration, as nested mappings."""
        self.findings = Findings(notes=list(config.notes))
        self._reasons: dict[str, str] = {}
        self._without_effect: tuple[str, ...] = ()
        default = functools.partial(default_of, program)
        for name, raw in config.values.items():
            canonical = canonical_name(program, name)
            value = config.resolve(raw, default)
            if value == "???":  # a value that Hydra wants to be given, and that is not
                continue
            if canonical != name and value is None:
                self.findings.num_same += 1
                continue
            if canonical in self.given:
                self.findings.num_same += 1
            self.given.pop(canonical, None)
            self.given[canonical] = value
            self.original[canonical] = name

    def get(self, name: str) -> Any:
        """The value of a key, or verl's default."""
        value = self.given.get(name)
        return default_of(self.program, name) if value is None else value

    def is_given(self, name: str) -> bool:
        return self.given.get(name) is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """The given keys below a prefix, without the prefix, as nested mappings."""
        tree: dict[str, Any] = {}
        for name, value in self.given.items():
            if name.startswith(f"{prefix}.") and value is not None:
                _put(tree, name.removeprefix(f"{prefix}."), value)
        return tree

    def set(self, name: str, value: Any) -> None:
        _put(self.fields, name, value)

    def lose(self, name: str, reason: str) -> None:
        """Report a given key as one without counterpart, because its value has none."""
        if name in self.given:
            self._reasons[name] = reason

    def ignore(self, *prefixes: str) -> None:
        """Keys that have no effect in this run: those of a part of verl that it does not use."""
        self._without_effect += prefixes

    def set_direct(self, *, prefixes: tuple[str, ...] = ()) -> None:
        """Set the fields of keys that mean the same, for all keys or those below one of the prefixes."""
        for row in KEYS_BY_PROGRAM[self.program]:
            if row.convert is None or (prefixes and not row.verl.startswith(prefixes)):
                continue
            value = self.get(row.verl)
            if value is None:
                continue
            ours = row.convert(value)
            if self.is_given(row.verl) or ours != look_up(_our_defaults(), row.ours[0]):
                self.set(row.ours[0], ours)

    def classify(self) -> None:
        """Sort every given key into the findings."""
        for name, value in self.given.items():
            row = find_key(self.program, name)
            shown = self.original[name]
            if value in (None, "", {}, []) or name.startswith(self._without_effect):
                self.findings.num_same += 1
            elif name in self._reasons:
                self.findings.missing.append((shown, value, self._reasons[name]))
            elif row is None:
                self.findings.missing.append((shown, value, "this key is not known"))
            else:
                self._add(row, shown, value)

    def _add(self, row: Key, shown: str, value: Any) -> None:
        if row.status == "missing" and value not in row.harmless:
            self.findings.missing.append((shown, value, row.note))
        elif row.status == "changed":
            self.findings.changed.append((shown, value, f"{self._ours(row)}; {row.note}"))
        elif row.status == "unneeded":
            self.findings.unneeded.append((shown, value, row.note))
        else:
            self.findings.num_same += 1

    def _ours(self, row: Key) -> str:
        found = [(name, look_up(self.fields, name)) for name in row.ours]
        return ", ".join(f"{name}: {value}" if value is not None else name for name, value in found)


def local_path(value: Any) -> str:
    """A path, with `~` replaced by the home folder."""
    text = str(value)
    return str(Path(text).expanduser()) if text.startswith("~") else text


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, last = name.split(".")
    for section in sections:
        inner = tree.get(section)
        tree[section] = inner if isinstance(inner, dict) else {}
        tree = tree[section]
    tree[last] = value


def look_up(tree: dict[str, Any], name: str) -> Any:
    found: Any = tree
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if isinstance(found, dict) else found


@functools.cache
def _our_defaults() -> dict[str, Any]:
    return RunConfig.model_validate({"model": {"path": "none"}}).model_dump(mode="json")
