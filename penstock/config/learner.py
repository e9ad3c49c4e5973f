"""Configuration of the learner: placement, optimizer, batches, checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.algorithms import ADVANTAGE_NAMES, AlgorithmConfig
from penstock.config.base import Config
from penstock.config.dataset import Files, refused_weights
from penstock.config.gpu_bundles import find_unplaceable

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb"]


class WandbConfig(Config):
    """Settings of the logger `wandb`. Its API key comes from WANDB_API_KEY or `wandb login`."""

    project: str = Field(default="penstock", min_length=1)
    """Project that the run appears in. The run has the name of this run."""
    entity: str = ""
    """Team or user. Empty means the default of the API key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` in the run's folder; upload it later with `wandb sync`."""


class SamplesConfig(Config):
    """Trained samples as text, in `samples.jsonl` of the run's folder, and those of validations, in
    `validation/samples.jsonl`."""

    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups that is written, chosen by prompt id. 0 means none."""
    max_bytes: int = Field(default=1 << 30, ge=0)
    """Largest size of the files in each folder. The oldest half is deleted when it is reached. 0 means no limit."""
    validation_samples: int = Field(default=256, ge=0)
    """Number of samples that are written of each validation. Files and data sources take turns. 0 means none."""
    table_every_steps: int = Field(default=10, ge=0)
    """Steps between two tables of samples for `tensorboard` and `wandb`; validations have one each. 0 means none."""
    table_rows: int = Field(default=8, ge=1, le=1000)
    """Number of samples in such a table: the worst and the best of the step, and others evenly between them."""


class ProfileConfig(Config):
    """Profiles of the learner, written to `profiles/` in the run's folder."""

    tool: Literal["torch", "nsight"] = "torch"
    """`torch` writes Chrome traces, and `nsight` reports of ranks on GPUs, which `nsys` starts."""
    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps that are recorded, one file per rank. Empty means none."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks of each role that are recorded."""
    ray_timeline: bool = False
    """Write Ray's timeline of all remote calls when the learner ends."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return ((self.steps and not self.ranks, "profile.steps needs at least one rank in profile.ranks"),)


class SftColumnsConfig(Config):
    """Names of the columns of supervised examples. A row has `messages`, or `prompt` and `response`, or `text`."""

    messages: str = "messages"
    """List of messages. Turns of the assistant are trained."""
    prompt: str = "prompt"
    """Text, or a list of messages. May be a field of a column: `extra_info.question`."""
    response: str = "response"
    """Text that is trained, after the prompt. May be a field of a column."""
    text: str = "text"
    """Text that is trained whole."""
    tools: str = "tools"
    """List of tools that the chat template shows to the model, or the same as JSON text. Only with messages."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(column.partition(".")[0] for column in self.model_dump().values())


class SftValidationConfig(Config):
    """Held-out examples whose loss is measured while the model is trained."""

    file: Files | None = None
    """Files in the same formats and with the same columns as the training files. None means no validation."""
    every_steps: int = Field(default=25, ge=1)
    """Number of steps between two validations. The model after the last step is validated in any case."""
    before_train: bool = True
    """Validate before the first step too."""


class SftConfig(Config):
    """Supervised fine-tuning. Optimizer, precision, adapter, checkpoints and loggers are those of `learner`."""

    file: Files | None = None
    """Files to train on, in every form of `dataset.file`. `--data` replaces it."""
    columns: SftColumnsConfig = SftColumnsConfig()
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the data."""
    batch_size: int = Field(default=64, ge=1)
    """Number of rows per optimizer step, over all ranks."""
    shuffle: bool = True
    """Train each epoch in a different random order, which is determined by `seed`."""
    last_batch: Literal["train", "drop"] = "train"
    """`train` makes one more, smaller step with the rows that do not fill an epoch's last batch; `drop` skips them."""
    train_on: Literal["all", "last"] = "all"
    """Which turns of a conversation are trained: all turns of the assistant, or only the last message."""
    text_prompts: Literal["text", "user"] = "text"
    """How a text prompt is used: as it is (`text`), or as the user's message in the chat template (`user`)."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Largest number of tokens of an example. None means the model's own context length."""
    too_long: Literal["error", "drop", "cut"] = "error"
    """What happens to a longer row: `error` ends with its place, `drop` skips it, `cut` keeps its first `max_tokens`
    tokens. The counts are printed at the start."""
    output: Literal["merged", "adapter"] = "merged"
    """With `learner.lora`: write the model with the adapter merged in, or the adapter alone, as peft does."""
    validation: SftValidationConfig = SftValidationConfig()

    def refused(self) -> tuple[tuple[object, str], ...]:
        return (refused_weights(self.validation.file),)


ALL_LINEAR: Literal["all-linear"] = "all-linear"
OWN_ROLE_WORKERS = ("critic", "reference", "reward_model")
"""Workers that a role of the user's own can have by name."""
ALLOWED_MISMATCH_NATS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Allowance for the mean difference per token between log-probs of two correct implementations, by dtype."""


class RoleConfig(Config):
    """Processes and devices of one model of the learner."""

    num_ranks: int = Field(default=1, ge=1, le=16384)
    """Number of processes that share the model by FSDP2. Usually one per GPU."""
    cpus_per_rank: float = Field(default=1.0, ge=0, le=4096)
    """CPUs that Ray reserves for each rank."""
    gpus_per_rank: float = Field(default=0.0, ge=0, le=4096)
    """GPUs that Ray reserves for each rank: 1 on GPUs, 0 on a machine without any."""
    pool: str = Field(default="", pattern=r"^([a-z][a-z0-9_]{0,31})?$")
    """Roles of one pool share GPUs. Empty means the placement's: the role's name, or in `split-collocate`, `policy`
    (with reference) or `critic` (all others)."""


class OtherRoleConfig(RoleConfig):
    """A role besides the policy."""

    sequence_parallel: int = Field(default=1, ge=1)
    """As `learner.sequence_parallel`, for the ranks of this role."""


class FrozenRoleConfig(OtherRoleConfig):
    """A role whose weights never change."""

    offload: bool = False
    """Keep its weights in host memory, from which each pass copies them."""


class ReferenceConfig(FrozenRoleConfig):
    """The frozen model that the KL penalty compares with."""

    path: Path | None = None
    """Folder of a model with the policy's tokenizer. None means `model.path`; with `learner.lora`, the policy with its
    adapter switched off is the reference, and no second model is loaded."""


class TrainedRoleConfig(OtherRoleConfig):
    """How a role besides the policy is trained. A setting that is None is the policy's, as are all others."""

    lr: float = Field(default=1e-5, gt=0, le=10)
    """Learning rate, if it is trained."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Its own decay. None here and below means the policy's."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Its own warm-up."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Its own clipping."""
    minibatches_per_step: int | None = Field(default=None, ge=1)
    """Its own parts of a batch."""
    epochs_per_step: int | None = Field(default=None, ge=1)
    """Its own passes over a batch."""


_OWN_SETTINGS = TrainedRoleConfig.model_fields.keys() - OtherRoleConfig.model_fields.keys() - {"lr"}


class LoraConfig(Config):
    """A low-rank adapter, trained in place of the model's own weights."""

    rank: int = Field(ge=1)
    """Rank of the adapter's matrices. A larger rank has more parameters and needs more memory."""
    alpha: int = Field(gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = ALL_LINEAR
    """Linear layers that get an adapter: names such as `[q_proj, v_proj]`, without `lm_head`, or `all-linear` for all
    of the decoder except routers and fused experts. Name these with their module: `experts.down_proj`."""


class CriticConfig(TrainedRoleConfig):
    """The value model of the advantage `gae`."""

    path: Path | None = None
    """Model folder; a one-label classifier keeps its head, others get one of zeros. None means `model.path`."""
    lora: LoraConfig | None = None
    """Train an adapter and the head."""


class JudgeConfig(Config):
    """A generative reward model, which is asked a yes-or-no question about each sample."""

    question: str = Field(min_length=1)
    """Text that is appended to a trajectory's tokens, including the markers of the chat template."""
    yes: str = "Yes"
    """The answer that means a good trajectory. It must be one token."""
    no: str = "No"
    """The answer that means a bad trajectory. It must be one token."""


class RewardModelConfig(FrozenRoleConfig):
    """A model in the learner that scores every sample before it is trained on."""

    path: Path
    """Folder of a sequence classifier with one label or, with `judge`, of a causal language model."""
    tokenizer: Literal["policy", "own"] = "policy"
    """Whether a reward model reads the policy's tokens, and needs its tokenizer, or text in its own chat template."""
    judge: JudgeConfig | None = None
    """Score by the probability of `yes` against `no` as the next token. None means by the classifier's head."""
    combine: Literal["add", "replace"] = "add"
    """`add` adds the score to the rollout server's reward, `replace` uses the score instead of it."""
    coefficient: float = 1.0
    """Factor by which the score is multiplied."""
    data_sources: tuple[str, ...] = ()
    """Data sources that it scores, as names or patterns such as `chat*`. Empty means all."""

    def scores_source(self, data_source: str) -> bool:
        return any(fnmatchcase(data_source, pattern) for pattern in self.data_sources or ("*",))


class OwnRoleConfig(TrainedRoleConfig, FrozenRoleConfig):
    """A role that you define and your step calls by its name in `learner.roles`."""

    worker: str = Field(min_length=1)
    """`critic`, `reference` or `reward_model` for another model of that kind, or your own class as
    `folder/file.py:Class` or `package.module:Class`."""
    path: Path | None = None
    """Model folder. None means `model.path`."""
    judge: JudgeConfig | None = None
    """With the worker `reward_model`: score by question instead of by a classifier's head."""
    tokenizer: Literal["policy", "own"] = "policy"
    """Whether a reward model reads the policy's tokens, and needs its tokenizer, or text in its own chat template."""
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Settings for your own worker class, which it reads as `self.settings.settings`."""

    @property
    def is_own_class(self) -> bool:
        return self.worker not in OWN_ROLE_WORKERS

    def refused(self) -> tuple[tuple[object, str], ...]:
        module, _, name = self.worker.replace(":", ".").rpartition(".")
        known = ", ".join(OWN_ROLE_WORKERS)
        return (
            (self.is_own_class and not (module and name),
             f"unknown worker {self.worker!r}: give {known}, or your own as folder/file.py:Class"),
            (self.worker == "reward_model" and self.path is None,
             "worker reward_model needs path, the folder of a classifier or, with judge, of any model"),
            (self.worker == "critic" and self.offload,
             "offload is for workers that are not trained: set learner.offload, which is for all that are"),
        )  # fmt: skip


class RouterConfig(Config):
    """The routers of a mixture of experts. It has no effect on a dense model."""

    aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Factor of the auxiliary loss that balances the load of the experts; 0.001 is usual. 0 means no such loss."""
    replay: bool = False
    """Train with the experts that the engine chose when it sampled, weighted by the learner's own scores. Needs the
    engine vllm or torch, and `layers x experts per token` more bytes per token."""

    @property
    def is_used(self) -> bool:
        return self.replay or self.aux_loss_coefficient > 0


class CheckpointConfig(Config):
    """How often the learner saves its state, and which state it starts from."""

    every_steps: int = Field(default=25, ge=1)
    """Number of steps between checkpoints, and the most that a crash repeats: a checkpoint acknowledges its groups."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    upload: str = Field(default="", pattern=r"^([a-z][a-z0-9+.-]*://.+)?$")
    """Object store that also gets every checkpoint, as `s3://bucket/prefix`; the run's name is added. Groups are then
    acknowledged once it is complete there, and a learner without a newer local one fetches it. Needs
    `penstock[objectstore]`. Empty means none."""
    keep_uploaded: int = Field(default=2, ge=1)
    """Number of uploaded checkpoints to keep. Older ones are deleted."""
    upload_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for which one call of the object store may fail before the learner ends; its next start continues."""
    resume: str = Field(default="auto", min_length=1)
    """`auto` continues from the newest checkpoint, `off` ignores checkpoints, and a path continues from that one, once.
    A checkpoint that does not cover every committed group is refused, unless `rewind` is set."""
    rewind: bool = False
    """Allow the path in `resume` to be older than the newest commit. The steps after it are abandoned: their prompts
    are trained again, and newer checkpoints are no longer used."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        text = "rewind needs resume to be the path of the checkpoint to rewind to"
        return ((self.rewind and self.resume in ("auto", "off"), text),)


class LearnerConfig(Config):
    """The learner: its models and where they run, the optimizer, batches, checkpoints and logs."""

    placement: Literal["standalone", "split-collocate"] = "standalone"
    """`standalone`: each model has its own GPUs. `split-collocate`: policy + reference, critic + reward model share."""
    policy: RoleConfig = RoleConfig()
    """The model that is trained."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL penalty, loaded if `algorithm.kl` needs one; with `lora`, only if it has a path."""
    critic: CriticConfig | None = None
    """Value model, which the advantage `gae` needs; `{}` takes the defaults. None means no critic."""
    reward_model: RewardModelConfig | None = None
    """Reward model that scores samples in the learner, in addition to the rollout servers' rewards. None means none."""
    roles: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], OwnRoleConfig] = Field(default_factory=dict)
    """Your own roles by name, for your own step."""
    step: str = ""
    """Your own function that trains on a batch, as `folder/file.py:function` or `package.module:function`. Empty means
    PPO if there is a critic, and GRPO otherwise."""
    ahead: str = ""
    """Your own function, named like `step`, by which frozen roles compute fields of the next batch during a step. Empty
    means the reward model's scores and the reference's log-probs."""
    max_role_restarts: int = Field(default=3, ge=0)
    """How often a role is restarted after one of its ranks died or hung. A checkpoint resets the count."""
    ray_address: str = Field(default="", pattern=r"^(auto|[^/\s]+:[0-9]{1,5})?$")
    """Ray cluster to join, as `HOST:PORT` of its head, or `auto` for one with a node on this machine. Its ranks outlive
    the controller, and a restarted controller adopts them. Empty starts a private Ray, which ends with the controller.
    Ray's default port, 6379, is also that of Redis: use another one."""
    publish_host: str = ""
    """Address at which rollout servers reach the weight publisher. Empty means the address of its Ray node."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics and the probes listen on; 0.0.0.0 lets Prometheus scrape from another machine."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics and the probes. 0 takes a free port and writes it to `learner.json` in the run's folder."""
    num_steps: int = Field(default=0, ge=0)
    """Number of steps; each trains a batch and makes a version. 0 trains until the dataset ends or the run stops."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lr: float = Field(default=1e-6, gt=0, le=10)
    """Learning rate of the policy's AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Constant that AdamW adds to the denominator for numerical stability."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps over which the learning rate grows linearly from 0, in the first step, to `lr`, as in verl."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """First step in which the policy learns; before it, only the critic does (verl's `trainer.critic_warmup`)."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. `linear` and `cosine` end at `min_lr_share` of `lr` after `num_steps`."""
    min_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of a `linear` or `cosine` schedule."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm if theirs is larger."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """An update that is not finite is skipped. After this many in a row, of policy or critic, the learner stops and
    saves the last batch in `nonfinite/` of the run's folder. 0 never stops."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    lora: LoraConfig | None = None
    """Train a low-rank adapter, which is then all that a weight push carries. None trains the whole model."""
    router: RouterConfig = RouterConfig()
    minibatches_per_step: int = Field(default=1, ge=1)
    """Number of equal parts that a batch is split into. Each part is one optimizer step."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Number of passes over a batch. One pass in one part is not clipped, except in correction mode `bypass`."""
    shuffle_minibatches: bool = False
    """Split a batch into parts at random in each epoch. False keeps the batch's order, as verl does."""
    shuffle_seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of `shuffle_minibatches`, together with the step's number: a repeated step has the same parts."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Maximum number of tokens in one forward and backward pass. Lower it if a rank runs out of GPU memory."""
    share_prefixes: bool = True
    """Compute tokens that samples of a group begin with, such as their prompt, once in every pass; `micro_batch_tokens`
    counts them once. Has no effect on models with recurrent layers, or whose positions depend on the length of a
    sequence."""
    logprob_chunk_tokens: int = Field(default=2048, ge=16)
    """Number of tokens whose logits are in memory at the same time. Lower it for large vocabularies."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the passes of policy and critic; gradients are reduced in float32. `auto`: float32 if `model.dtype`
    is float32, otherwise bfloat16."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and optimizer of policy and critic. bfloat16 halves their memory and loses small updates."""
    activation_checkpointing: float = Field(default=1.0, ge=0, le=1)
    """Share of layers whose activations are recomputed. 1 needs the least memory; 0 is up to a third faster."""
    compile: bool = False
    """Compile each layer and the log-probs with `torch.compile` while the first batch is generated. Faster on a GPU;
    the result is kept in `cache_dir`."""
    activation_memory: float = Field(default=1.0, ge=0, le=1)
    """With `compile`: share of activations kept in layers that `activation_checkpointing` does not recompute; the
    cheapest ones to recompute are dropped first."""
    offload: Literal["none", "optimizer", "weights", "all"] = "none"
    """What policy and critic keep in host memory: nothing, Adam's moments, weights and gradients, or all of these.
    Slower, for models that do not fit otherwise."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Policy ranks that share each sequence (Ulysses). Divides `policy.num_ranks` and the number of attention heads."""
    expert_parallel: int = Field(default=1, ge=1)
    """Policy ranks that share the experts of each layer: a rank computes its own, for the tokens of all. Divides the
    number of experts, and `shard_size`."""
    shard_size: int = Field(default=0, ge=0)
    """Policy ranks among which weights and optimizer are divided; each such group has a copy (HSDP). 0 means all."""
    max_logprob_mismatch_nats: float = Field(default=0.1, ge=0)
    """Largest mean difference per token between the log-probs of a rollout server and of the learner, checked in every
    step; typically 1e-5 in float32 and 0.01 in bfloat16. A server beyond it is quarantined, and the learner ends if
    all are. 0 means no check."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that the learner waits for a full batch, not counting the previous step, before it ends with an error."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call to a role's ranks, including their collective operations."""
    peak_flops_per_rank: float = Field(default=0.0, ge=0)
    """Peak FLOP/s of a policy rank's device, for `penstock_learner_mfu_ratio`. 0 means the known value of the GPU."""
    threads_per_rank: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads that torch uses in each rank."""
    loggers: tuple[LoggerName, ...] = ("jsonl",)
    """Where the metrics of each step go, in addition to Prometheus. `jsonl` writes `metrics.jsonl` in the run's folder,
    which `penstock demo` and `simulate` read; `tensorboard` and `wandb` need their packages."""
    wandb: WandbConfig = WandbConfig()
    samples: SamplesConfig = SamplesConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def needed_roles(self) -> dict[str, RoleConfig]:
        """The roles that this run uses, by name."""
        has_reference = self.algorithm.kl.placement != "none" and not self.policy_is_reference
        roles = {
            "policy": self.policy,
            "reference": self.reference if has_reference else None,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        return {name: role for name, role in roles.items() if role is not None} | self.roles

    def training_of(self, role: str) -> LearnerConfig:
        """The settings to train a role with: these, with the role's own in place of the policy's."""
        config = self.roles.get(role) or getattr(self, role, None)
        own = {name: value for name in _OWN_SETTINGS if (value := getattr(config, name, None)) is not None}
        return self.model_copy(update=own) if own else self

    def sequence_parallel_of(self, role: str) -> int:
        """How many ranks of a role share each sequence."""
        config = self if role == "policy" else self.roles.get(role) or getattr(self, role, None)
        return config.sequence_parallel if config is not None else 1

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether a step computes the policy's own log-probs of the batch before its first update.

        If the step has a single update, its own forward pass gives them. Only a KL penalty in the reward needs them
        before."""
        is_once = self.minibatches_per_step * self.epochs_per_step == 1
        return self.algorithm.correction.recomputes and (not is_once or self.algorithm.kl.in_reward)

    @property
    def keeps_weights_on_host(self) -> bool:
        """Whether trained weights and their gradients are in host memory, from which each pass copies them."""
        return self.offload in ("weights", "all")

    @property
    def policy_is_reference(self) -> bool:
        """Whether the policy, with its adapter switched off, is the model that the KL penalty compares with."""
        return self.algorithm.kl.placement != "none" and self.lora is not None and self.reference.path is None

    def refused(self) -> tuple[tuple[object, str], ...]:
        name, critic, lora = self.algorithm.advantage.name, self.critic, self.lora
        taken = next(iter(sorted(self.roles.keys() & {"policy", "reference", "critic", "reward_model"})), "")
        unplaceable = find_unplaceable(self.placement, self.needed_roles)
        warmups = {"warmup_steps": self.warmup_steps} | {
            f"{'roles.' * (name in self.roles)}{name}.warmup_steps": self.training_of(name).warmup_steps
            for name in self.needed_roles
        }
        longest = max(warmups, key=warmups.__getitem__)
        unshared = next((f"{'roles.' * (name in self.roles)}{name}" for name, role in self.needed_roles.items()
                         if role.num_ranks % self.sequence_parallel_of(name) and name != "policy"), "")  # fmt: skip
        return (
            (name == "gae" and critic is None,
             "advantage gae needs a critic: add `learner.critic: {}`, or choose another advantage"),
            (critic is not None and name != "gae" and name in ADVANTAGE_NAMES and not self.step,
             f"advantage {name} does not use a critic: remove learner.critic, or choose advantage gae"),
            (self.critic_warmup_steps and critic is None,
             "critic_warmup_steps needs a critic: add `learner.critic: {}`, or set it to 0"),
            (taken, f"learner.roles.{taken}: the name is taken by learner.{taken}; choose another one"),
            (self.roles and not self.step and not self.ahead,
             "learner.roles needs your own step that calls them: set learner.step or learner.ahead"),
            (self.lr_schedule != "constant" and self.num_steps <= warmups[longest],
             f"lr_schedule {self.lr_schedule} needs num_steps above {longest}, because it ends at num_steps"),
            (self.policy.num_ranks % self.sequence_parallel,
             "policy.num_ranks, which torchrun sets for sft, must be a multiple of sequence_parallel"),
            (unshared, f"{unshared}.num_ranks must be a multiple of its sequence_parallel"),
            (self.policy.num_ranks % (self.shard_size or 1),
             "policy.num_ranks, which torchrun sets for sft, must be a multiple of shard_size"),
            ((self.shard_size or self.policy.num_ranks) % self.expert_parallel,
             "shard_size, or without it policy.num_ranks, must be a multiple of expert_parallel"),
            (self.expert_parallel > 1 and lora is not None,
             "expert_parallel is for training whole weights: remove lora, or set expert_parallel to 1"),
            (unplaceable,
             f"gpus_per_rank of {unplaceable} must add up to at most 1, or be whole numbers: a rank's share is on one "
             "GPU"),
            (lora is not None and "lm_head" in lora.target_modules,
             "lora.target_modules cannot contain lm_head; engines and learner adapt the layers only"),
        )  # fmt: skip
