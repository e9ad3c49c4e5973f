"""Configuration of the learner: placement, optimizer, batches, checkpoints."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.config.algorithms import ADVANTAGE_NAMES, AlgorithmConfig
from penstock.config.base import Config
from penstock.config.dataset import Files, listed_files
from penstock.config.gpu_bundles import find_unplaceable

# ── Configuration of the learner's step loggers and profiler ──


LoggerName = Literal["console", "jsonl", "tensorboard", "wandb"]


class WandbConfig(Config):
    """Settings of the logger `wandb`. Its API key comes from WANDB_API_KEY or `wandb login`."""

    project: str = Field(default="penstock", min_length=1)
    """Project that the run appears in. The run has the name of this run."""
    entity: str = ""
    """Team or user. Empty: the default of the API key."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` in the run's folder; upload it later with `wandb sync`."""


class SamplesConfig(Config):
    """Trained samples as text, written to `samples.jsonl` in the run's folder. `penstock samples` shows them."""

    share: float = Field(default=1.0, ge=0, le=1)
    """Share of the groups that is written, chosen by prompt id. 0: none."""
    max_bytes: int = Field(default=1 << 30, ge=0)
    """Size that the files may have. The oldest samples are deleted, half of the files at a time. 0: no limit."""
    table_every_steps: int = Field(default=10, ge=0)
    """Number of steps between two tables of samples that the loggers `tensorboard` and `wandb` get. 0: none."""
    table_rows: int = Field(default=8, ge=1, le=1000)
    """Number of samples in such a table: the worst and the best of the step, and others evenly between them."""


class ProfileConfig(Config):
    """Profiles of the learner, written to `profiles/` in the run's folder."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps that the torch profiler records, with one Chrome trace per rank. Empty: none."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks of each role that the profiler records."""
    ray_timeline: bool = False
    """Write Ray's timeline of all remote calls when the learner ends."""

    @model_validator(mode="after")
    def _ranks_are_named(self) -> Self:
        if self.steps and not self.ranks:
            raise ValueError("profile.steps needs at least one rank in profile.ranks")
        return self


# ── Configuration of supervised fine-tuning (`penstock sft`) ──


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
        names = (self.messages, self.prompt, self.response, self.text, self.tools)
        return tuple(name.partition(".")[0] for name in names)


class SftValidationConfig(Config):
    """Held-out examples whose loss is measured while the model is trained."""

    file: Files | None = None
    """Files in the same formats and with the same columns as the training files. None: no validation."""
    every_steps: int = Field(default=25, ge=1)
    """Number of steps between two validations. The model after the last step is validated in any case."""
    before_train: bool = True
    """Validate before the first step too."""


class SftConfig(Config):
    """Supervised fine-tuning. Optimizer, schedule, precision, adapter, checkpoints and loggers are those of
    `learner`."""

    file: Files | None = None
    """Parquet or JSONL file, a folder written by Hugging Face's `save_to_disk`, a pattern, a Hub id, or a list of these
    with weights, as in `dataset.file`. `--data` replaces it."""
    columns: SftColumnsConfig = SftColumnsConfig()
    epochs: int = Field(default=1, ge=1)
    """Number of passes over the data."""
    batch_size: int = Field(default=64, ge=1)
    """Number of rows per optimizer step, over all ranks."""
    shuffle: bool = True
    """Train each epoch in a different random order, which is determined by `seed`."""
    last_batch: Literal["train", "drop"] = "train"
    """What happens at the end of an epoch to rows that do not fill a batch. `train` makes one more, smaller step with
    them; `drop` leaves them out of this epoch."""
    train_on: Literal["all", "last"] = "all"
    """Which turns of a conversation are trained: all turns of the assistant, or only the last message."""
    text_prompts: Literal["text", "user"] = "text"
    """What a prompt that is a text is. `text`: it is taken as it is. `user`: a message of the user, which the chat
    template renders."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Largest number of tokens of an example. None: the model's own context length."""
    too_long: Literal["error", "drop", "cut"] = "error"
    """What happens to a row that is longer. `error` ends with its place, `drop` leaves the row out, `cut` keeps its
    first `max_tokens` tokens. The numbers of dropped and cut rows are said at the start."""
    output: Literal["merged", "adapter"] = "merged"
    """With `learner.lora`: write the model with the adapter merged in, or the adapter alone, as peft does."""
    validation: SftValidationConfig = SftValidationConfig()

    @model_validator(mode="after")
    def _held_out_rows_have_no_weights(self) -> SftConfig:
        if any(entry.weight != 1 for entry in listed_files(self.validation.file)):
            raise ValueError("validation.file: every row is validated once, so it takes no weights")
        return self


ALL_LINEAR: Literal["all-linear"] = "all-linear"
OWN_ROLE_WORKERS = ("critic", "reference", "reward_model")
"""Workers that a role of the user's own can have by name."""
TYPICAL_MISMATCH_NATS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
"""Upper end of the usual mean difference per token between the log-probs of two correct implementations of the same
model, by dtype."""


class RoleConfig(Config):
    """Processes and devices of one model of the learner."""

    num_ranks: int = Field(default=1, ge=1, le=16384)
    """Number of processes that share the model by FSDP2. Usually one per GPU."""
    cpus_per_rank: float = Field(default=1.0, ge=0, le=4096)
    """CPUs that Ray reserves for each rank."""
    gpus_per_rank: float = Field(default=0.0, ge=0, le=4096)
    """GPUs that Ray reserves for each rank: 1 on GPUs, 0 on a machine without any."""


class ReferenceConfig(RoleConfig):
    """The frozen model that the KL penalty compares with."""

    path: Path | None = None
    """Folder of the model. It must use the policy's tokenizer. None: `model.path`. With `learner.lora` and no path of
    its own, no second model is loaded: the policy computes the reference's log-probs with its adapter switched off."""


class CriticConfig(RoleConfig):
    """The value model of the advantage `gae`."""

    path: Path | None = None
    """Model folder of the backbone. None: `model.path`. A sequence classifier with one label keeps its head; any other
    model gets a new head of zeros."""
    lr: float = Field(default=1e-5, gt=0, le=10)
    """Learning rate of the critic's AdamW. It shares betas, weight decay, warm-up and clipping with the policy."""


class JudgeConfig(Config):
    """A generative reward model, which is asked a yes-or-no question about each sample."""

    question: str = Field(min_length=1)
    """Text that is appended to a trajectory's tokens, including the markers of the chat template."""
    yes: str = "Yes"
    """The answer that means a good trajectory. It must be one token."""
    no: str = "No"
    """The answer that means a bad trajectory. It must be one token."""


class RewardModelConfig(RoleConfig):
    """A model in the learner that scores every sample before it is trained on."""

    path: Path
    """Folder of a sequence classifier with one label or, with `judge`, of a causal language model."""
    tokenizer: Literal["policy", "own"] = "policy"
    """`policy`: it reads exactly the tokens of a sample, and must have the policy's tokenizer. `own`: it reads the text
    of a sample, in its own chat template and tokens."""
    judge: JudgeConfig | None = None
    """Score by question: the probability of `yes` against `no` as the next token. None: score by the classifier's
    head."""
    combine: Literal["add", "replace"] = "add"
    """`add` adds the score to the rollout server's reward, `replace` uses the score instead of it."""
    coefficient: float = 1.0
    """Factor by which the score is multiplied."""
    data_sources: tuple[str, ...] = ()
    """Data sources that it scores, as names or patterns such as `chat*`. Empty: all."""

    def scores_source(self, data_source: str) -> bool:
        return any(fnmatchcase(data_source, pattern) for pattern in self.data_sources or ("*",))


class OwnRoleConfig(RoleConfig):
    """A role of your own, which your step calls by its name in `learner.roles`."""

    worker: str = Field(min_length=1)
    """Its worker: `critic`, `reference` or `reward_model` for another model of that kind, or a class of your own as
    `folder/file.py:Class` or `package.module:Class`."""
    path: Path | None = None
    """Model folder. None: `model.path`."""
    lr: float = Field(default=1e-5, gt=0, le=10)
    """Learning rate, if the worker is trained. It shares betas, weight decay, warm-up and clipping with the policy."""
    judge: JudgeConfig | None = None
    """With the worker `reward_model`: score by question instead of by a classifier's head."""
    tokenizer: Literal["policy", "own"] = "policy"
    """With the worker `reward_model`: read the policy's tokens, or the text in the model's own tokens."""
    shares_gpus_of: Literal["policy", "critic", "none"] = "critic"
    """Whose GPUs it shares in the placement `split-collocate`: those of policy and reference, those of critic and
    reward model, or `none` for GPUs of its own. In the placement `standalone` every role has its own."""
    settings: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Settings for a worker class of your own, which it reads as `self.settings.settings`."""

    @property
    def is_own_class(self) -> bool:
        return self.worker not in OWN_ROLE_WORKERS

    @model_validator(mode="after")
    def _worker_can_be_found(self) -> Self:
        module, _, name = self.worker.replace(":", ".").rpartition(".")
        if self.is_own_class and not (module and name):
            known = ", ".join(OWN_ROLE_WORKERS)
            raise ValueError(f"unknown worker {self.worker!r}: give {known}, or your own as folder/file.py:Class")
        if self.worker == "reward_model" and self.path is None:
            raise ValueError("worker reward_model needs path, the folder of a classifier or, with judge, of any model")
        return self


class LoraConfig(Config):
    """A low-rank adapter, trained in place of the model's own weights."""

    rank: int = Field(ge=1)
    """Rank of the adapter's matrices. A larger rank has more parameters and needs more memory."""
    alpha: int = Field(gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = ALL_LINEAR
    """The linear layers that get an adapter. `all-linear`: all of the decoder, whatever they are called, but not the
    routers and fused experts of a mixture of experts. Else a list of names, such as `[q_proj, v_proj]`; `lm_head` is
    not allowed."""


class RouterConfig(Config):
    """The routers of a mixture of experts. It has no effect on a dense model."""

    aux_loss_coefficient: float = Field(default=0.0, ge=0)
    """Factor of the auxiliary loss that keeps the load of the experts even. It is computed over the prompt and response
    tokens of each micro-batch, and the micro-batches are weighted by their trained tokens. 0.001 is a usual value. 0:
    no such loss."""
    replay: bool = False
    """Train with the experts that the engine chose when it sampled (router replay), weighted by the learner's own
    scores. Engine and learner then never disagree about experts. Needs the engine vllm or torch. Each token of a group
    takes `layers x experts per token` more bytes."""

    @property
    def is_used(self) -> bool:
        return self.replay or self.aux_loss_coefficient > 0


class CheckpointConfig(Config):
    """How often the learner saves its state, and which state it starts from."""

    every_steps: int = Field(default=25, ge=1)
    """Number of steps between checkpoints. It is also the most that a crash repeats: groups are acknowledged only when
    a checkpoint covers them."""
    keep: int = Field(default=2, ge=1)
    """Number of checkpoints to keep. Older ones are deleted."""
    upload: str = Field(default="", pattern=r"^([a-z][a-z0-9+.-]*://.+)?$")
    """Object store that also gets every checkpoint, as `s3://bucket/prefix`; the run's name is added. Groups are then
    acknowledged only when their checkpoint is complete there, and a learner whose folder is empty or older fetches the
    newest one. Needs `penstock[objectstore]`. Empty: the run's folder is the only place."""
    keep_uploaded: int = Field(default=2, ge=1)
    """Number of uploaded checkpoints to keep. Older ones are deleted."""
    upload_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for which the object store may fail to answer one call. Then the learner ends with an error. It continues
    at its next start."""
    resume: str = Field(default="auto", min_length=1)
    """`auto` continues from the newest checkpoint in the run's folder, `off` ignores checkpoints. A path continues from
    that checkpoint once: a later restart continues from the checkpoints made since. A checkpoint that does not cover
    every committed group is refused, unless `rewind` is set."""
    rewind: bool = False
    """Allow `resume`, which must be a path, to rewind the run to a checkpoint from before the newest commit. The steps
    after it are abandoned: their prompts return to the queue and are trained again, and newer checkpoints are no longer
    used."""

    @model_validator(mode="after")
    def _check_rewind(self) -> CheckpointConfig:
        if self.rewind and self.resume in ("auto", "off"):
            raise ValueError("rewind needs resume to be the path of the checkpoint to rewind to")
        return self


class LearnerConfig(Config):
    """The learner: its models and where they run, the optimizer, batches, checkpoints and logs."""

    placement: Literal["standalone", "split-collocate"] = "standalone"
    """Which models share GPUs. `standalone`: every model has its own. `split-collocate`: policy and reference share one
    set of GPUs, critic and reward model another."""
    policy: RoleConfig = RoleConfig()
    """The model that is trained."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model that the KL penalty compares with. Only loaded if `algorithm.kl.placement` is not `none`, and
    not with `lora`, unless it has a path of its own."""
    critic: CriticConfig | None = None
    """Value model, which the advantage `gae` needs; `{}` takes the defaults. None: no critic."""
    reward_model: RewardModelConfig | None = None
    """Reward model that scores samples in the learner, besides the rewards of the rollout servers. None: no such
    model."""
    roles: dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")], OwnRoleConfig] = Field(default_factory=dict)
    """Roles of your own by name, for a step of your own."""
    step: str = ""
    """The function that trains on a batch, as `folder/file.py:function` or `package.module:function`. Empty: PPO if
    there is a critic, GRPO otherwise."""
    ahead: str = ""
    """The function that has the frozen roles compute fields of a batch while the batch before it is trained, named as
    `step` is. Empty: the reward model's scores and the reference's log-probs."""
    max_role_restarts: int = Field(default=3, ge=0)
    """How often a role is restarted after one of its ranks died or hung. A checkpoint resets the count."""
    spare_ranks: bool = False
    """Keep a started process without a model in reserve for each rank. When a rank dies, its role then skips the start
    of processes and their imports. Costs about 0.5 GB of host memory per rank, and no GPU memory."""
    ray_address: str = ""
    """Address of the Ray cluster to join. Its ranks outlive the controller, and a restarted controller adopts them.
    Empty: start a private one on this machine, which ends with the controller."""
    publish_host: str = ""
    """Address at which rollout servers reach the weight publisher. Empty: the address of the Ray node that the
    publisher runs on."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics and the probes listen on. Use 0.0.0.0 to let Prometheus scrape it from another machine."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics and the probes. 0: take a free port and write it to `learner.json` in the run's folder."""
    num_steps: int = Field(default=0, ge=0)
    """Number of training steps. Each trains on one batch and makes one policy version. The run also finishes when its
    dataset has ended. 0: train until then, or until stopped."""
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
    """First step in which the policy learns, as `trainer.critic_warmup` of verl. Before it only the critic does. The
    policy's learning rate schedule begins with this step. 0 and 1: both learn from the first step."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. `linear` and `cosine` would reach `min_lr_share` of `lr` in the step after
    `num_steps`."""
    min_lr_share: float = Field(default=0.0, ge=0, le=1)
    """Share of `lr` that is left at the end of a `linear` or `cosine` schedule."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm if theirs is larger."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """An update with a loss or gradient that is not finite is skipped. After this many skipped updates in a row, of the
    policy or of the critic, the learner stops and saves the last batch in `nonfinite/` of the run's folder. 0: never
    stop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the whole model. A weight push then carries only the adapter. None: train the
    whole model."""
    router: RouterConfig = RouterConfig()
    minibatches_per_step: int = Field(default=1, ge=1)
    """Number of equal parts that a batch is split into. Each part is one optimizer step."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Number of passes over a batch. With one pass and one part the policy has not moved when a sample is trained on,
    so clipping has no effect except in correction mode `bypass`."""
    shuffle_minibatches: bool = False
    """Split the batch of a step into parts at random, anew in each of its epochs. False: parts are made of neighbouring
    samples and trained in the batch's order, as verl does by default."""
    shuffle_seed: int = Field(default=42, ge=0, lt=2**32)
    """Seed of `shuffle_minibatches`. The parts also depend on the number of the step, so that a step which is repeated
    after a crash has the same ones."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Maximum number of tokens in one forward and backward pass. Lower it if a rank runs out of GPU memory."""
    share_prefixes: bool = True
    """Compute tokens that the samples of a group begin with, such as their prompt, once in every forward and backward
    pass. Results are the same but for rounding. A shared token counts once in `micro_batch_tokens`. It has no effect
    on groups that share little, and on models whose positions depend on the length of a sequence."""
    logprob_chunk_tokens: int = Field(default=2048, ge=16)
    """Number of tokens whose logits are in memory at the same time; the backward pass holds as many logits. Lower it
    for large vocabularies."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the forward and backward passes of the policy and the critic. Gradients are always reduced in
    float32. `auto`: float32 if `model.dtype` is float32, otherwise bfloat16."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the weights and the optimizer state of the policy and the critic. bfloat16 halves their memory, but
    loses updates that are small compared with their weight."""
    activation_checkpointing: float = Field(default=1.0, ge=0, le=1)
    """Share of the layers whose activations are recomputed in the backward pass instead of kept. 1 needs the least
    memory; 0 is up to a third faster."""
    compile: bool = False
    """Compile each layer and the log-probs with `torch.compile`. Faster on a GPU. The learner compiles while the
    servers start and generate the first batch, and keeps the result in `cache_dir`."""
    activation_memory: float = Field(default=1.0, ge=0, le=1)
    """With `compile`: share of activations that is kept in layers which `activation_checkpointing` does not recompute.
    Below 1, the activations that are cheapest to recompute are dropped first."""
    cpu_offload: bool = False
    """Keep weights and optimizer state in host memory and update them there; layers are copied to the GPU one by one.
    Slower, for models that do not fit otherwise."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Number of policy ranks that share the tokens of each sequence (Ulysses), for contexts that do not fit on one GPU.
    It must divide `policy.num_ranks` and the number of attention heads."""
    max_logprob_mismatch_nats: float = Field(default=0.1, ge=0)
    """Largest mean difference, per token, between the log-probs of a rollout server and of the learner on the same
    weights. It is checked in every step. A server beyond it is put into quarantine, and the learner ends if every
    server is. Typical values are 1e-5 in float32 and 0.01 in bfloat16. 0: no check."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that the learner waits for a full batch before it stops with an error. The time of the previous step,
    during which the batch is already being read, does not count."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline, in seconds, of one call to a role's ranks, including their collective operations."""
    peak_flops_per_rank: float = Field(default=0.0, ge=0)
    """Peak FLOP/s of one policy rank's device, for the metric `penstock_learner_mfu_ratio`. 0: use the dense bfloat16
    rate of a known GPU; for other devices the metric stays 0."""
    threads_per_rank: int = Field(default=1, ge=1, le=1024)
    """Number of CPU threads that torch uses in each rank."""
    loggers: tuple[LoggerName, ...] = ("jsonl",)
    """Where the metrics of each step are written, besides Prometheus. `jsonl` writes `metrics.jsonl` in the run's
    folder, which `penstock demo` and `penstock simulate` read. `tensorboard` and `wandb` need the package of that
    name."""
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

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether a step computes the policy's own log-probs of the batch before its first update.

        If the step has a single update, its own forward pass gives them. Only a KL penalty in the reward needs them
        before."""
        is_once = self.minibatches_per_step * self.epochs_per_step == 1
        return self.algorithm.correction.recomputes and (not is_once or self.algorithm.kl.in_reward)

    @property
    def policy_is_reference(self) -> bool:
        """Whether the policy, with its adapter switched off, is the model that the KL penalty compares with."""
        return self.algorithm.kl.placement != "none" and self.lora is not None and self.reference.path is None

    @model_validator(mode="after")
    def _critic_is_there_where_it_is_used(self) -> Self:
        name = self.algorithm.advantage.name
        if name == "gae" and self.critic is None:
            raise ValueError("advantage gae needs a critic: add `learner.critic: {}`, or choose another advantage")
        if self.critic is not None and name != "gae" and name in ADVANTAGE_NAMES and not self.step:
            raise ValueError(
                f"advantage {name} does not use a critic: leave learner.critic out, or choose advantage gae"
            )
        if self.critic_warmup_steps and self.critic is None:
            raise ValueError("critic_warmup_steps needs a critic: add `learner.critic: {}`, or set it to 0")
        return self

    @model_validator(mode="after")
    def _own_roles_are_used(self) -> Self:
        if taken := sorted(self.roles.keys() & {"policy", "reference", "critic", "reward_model"}):
            raise ValueError(f"learner.roles.{taken[0]}: the name is taken by learner.{taken[0]}; choose another one")
        if self.roles and not self.step and not self.ahead:
            raise ValueError(
                "learner.roles needs a step of your own that calls them: set learner.step or learner.ahead"
            )
        return self

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        if self.lr_schedule != "constant" and self.num_steps <= self.warmup_steps:
            raise ValueError(
                f"lr_schedule {self.lr_schedule} needs num_steps above warmup_steps, because it ends at num_steps"
            )
        return self

    @model_validator(mode="after")
    def _ranks_form_whole_groups(self) -> Self:
        if self.policy.num_ranks % self.sequence_parallel:
            raise ValueError("policy.num_ranks, which torchrun sets for sft, must be a multiple of sequence_parallel")
        return self

    @model_validator(mode="after")
    def _ranks_fit_on_gpus(self) -> Self:
        if names := find_unplaceable(self.placement, self.needed_roles):
            raise ValueError(
                f"gpus_per_rank of {names} must add up to at most 1, or be whole numbers: a rank's share is on one GPU"
            )
        return self

    @model_validator(mode="after")
    def _watched_routers_are_not_compiled(self) -> Self:
        if self.compile and self.router.is_used:
            raise ValueError("router.replay and router.aux_loss_coefficient need compile to be false")
        return self

    @model_validator(mode="after")
    def _head_is_not_adapted(self) -> Self:
        if self.lora is not None and "lm_head" in self.lora.target_modules:
            raise ValueError("lora.target_modules cannot contain lm_head; engines and learner adapt the layers only")
        return self
