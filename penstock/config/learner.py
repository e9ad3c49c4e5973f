"""Configuration of the learner: placement, optimizer, batches, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config.algorithms import ADVANTAGE_NAMES, AlgorithmConfig
from penstock.config.base import Config
from penstock.config.loggers import LoggerName, ProfileConfig, WandbConfig


class RoleConfig(Config):
    num_ranks: int = Field(default=1, ge=1)
    cpus_per_rank: float = Field(default=1.0, ge=0)
    gpus_per_rank: float = Field(default=0.0, ge=0)


class CriticConfig(RoleConfig):
    path: Path | None = None
    """Model folder of the backbone; None: `model.path`. A sequence classifier with one label brings its head along,
    any other model gets a head of zeros."""
    lr: float = Field(default=1e-5, gt=0)
    """Learning rate of its own AdamW; betas, decay, warm-up and clipping are the policy's."""


class JudgeConfig(Config):
    question: str = Field(min_length=1)
    """Text that follows a trajectory's tokens and asks the model about them, chat markers included."""
    yes: str = "Yes"
    """Answer that speaks for the trajectory; one token."""
    no: str = "No"
    """Answer that speaks against it; one token."""


class RewardModelConfig(RoleConfig):
    path: Path
    """Folder of a sequence classifier with one label, or with `judge` of a causal model, on the policy's tokenizer."""
    judge: JudgeConfig | None = None
    """Generative reward: the score is the probability of `yes` against `no` as the next token after the question."""
    combine: Literal["add", "replace"] = "add"
    """Whether the score is added to the reward that came with the sample, or takes its place."""
    coefficient: float = 1.0
    """The score is multiplied by it."""
    data_sources: tuple[str, ...] = ()
    """Which data sources it scores, as names or patterns such as `chat*`; empty: all."""


class LoraConfig(Config):
    rank: int = Field(ge=1)
    alpha: int = Field(gt=0)
    """The adapter is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class CheckpointConfig(Config):
    every_steps: int = Field(default=25, ge=1)
    """Groups are acknowledged only once a checkpoint covers them, so this also bounds what a crash repeats."""
    keep: int = Field(default=2, ge=1)
    resume: str = Field(default="auto", min_length=1)
    """`auto` continues from the newest checkpoint of the run's folder, `off` from none. A path goes back to that
    checkpoint of the run, once: a restart continues from what was made since."""


class LearnerConfig(Config):
    placement: Literal["standalone", "split-collocate"] = "standalone"
    """`standalone`: every role in a resource group of its own. `split-collocate`: policy and reference share one,
    critic and reward model another."""
    policy: RoleConfig = RoleConfig()
    reference: RoleConfig = RoleConfig()
    critic: CriticConfig | None = None
    """Values for advantage gae; `{}` takes the defaults. None: no critic."""
    reward_model: RewardModelConfig | None = None
    """Scores every sample beside the rewards of the rollout servers. None: there is none."""
    max_role_restarts: int = Field(default=3, ge=0)
    """How often in a row, without a checkpoint between, one role is restarted after a rank of it died or hung."""
    ray_address: str = ""
    """Ray cluster to join; empty starts a private one on this machine."""
    publish_host: str = ""
    """Address at which rollout servers meet the publisher for a weight transfer; empty takes that of the Ray node on
    which the publisher runs."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where /metrics is served; 0 takes a free port and writes it to the run's folder."""
    num_steps: int = Field(default=100, ge=0)
    """Steps of the run, a batch and a version each; 0 trains until it is stopped."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate grows linearly over these steps."""
    critic_warmup_steps: int = Field(default=0, ge=0)
    """The policy keeps its weights for the first steps, while the critic learns."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: `linear` and `cosine` fall to `min_lr_share` of `lr` at step `num_steps`."""
    min_lr_share: float = Field(default=0.0, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0)
    max_skipped_steps: int = Field(default=3, ge=0)
    """An update whose loss or gradient is not finite leaves the weights as they are. After so many of the policy or of
    the critic in a row the learner stops and keeps the last batch in `nonfinite/` of the run's folder; 0: never."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the whole model; a push then carries the adapter only."""
    minibatches_per_step: int = Field(default=1, ge=1)
    """Parts of a batch, of equally many samples; each is an optimizer step of its own."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Passes over a batch. With one pass and one part nothing has moved yet when a sample is trained: no clip of the
    loss or of the values acts, but that of correction mode `bypass`."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Token budget of one forward and backward pass."""
    logprob_chunk_tokens: int = Field(default=2048, ge=16)
    """Tokens whose logits exist at one time; or as many logits of all tokens."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of forward and backward passes of the roles that train; gradients are reduced in float32 in any case. `auto`:
    float32 where `model.dtype` is, else bfloat16."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and Adam's state of the roles that train. bfloat16 halves their memory, and loses updates that are
    small beside their weight."""
    activation_checkpointing: float = Field(default=1.0, ge=0, le=1)
    """Share of the layers whose activations are computed again in the backward pass instead of kept: 1 needs the least
    memory, 0 is up to a third faster."""
    compile: bool = False
    """Fuse each layer, and the log-probs, with `torch.compile`: faster on a GPU, after a slow first step."""
    activation_memory: float = Field(default=1.0, ge=0, le=1)
    """With `compile`, the share of a layer's activations that is kept where the layer is not computed again as a whole;
    below 1, those that cost the least time to compute again go first."""
    cpu_offload: bool = False
    """Keep weights and Adam's state in host memory, and step there; layers visit the GPU one by one."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Ranks of the policy that share each sequence's tokens (Ulysses), for contexts that one GPU cannot hold; a divisor
    of `policy.num_ranks` and of the attention heads."""
    max_logprob_mismatch_nats: float = Field(default=0.1, ge=0)
    """Mean difference of the engines' and the learner's log-probs on the same weights above which the learner refuses
    to train, by the first step that can be compared. 0 never refuses. Typical: 1e-5 in float32, 0.01 in bfloat16."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """The learner stops with an error when it has waited so long for a full batch. The step before, beside which the
    batch is read already, does not count."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call to a role's ranks, collectives included."""
    peak_flops_per_rank: float = Field(default=0.0, ge=0)
    """What the device of one policy rank can do in a second, for `penstock_learner_mfu_ratio`. 0 takes the dense
    bfloat16 figure of a GPU that is known; the ratio is 0 where there is none."""
    threads_per_rank: int = Field(default=1, ge=1)
    """CPU threads of each rank."""
    loggers: tuple[LoggerName, ...] = ("jsonl",)
    """Where the numbers of each step go besides Prometheus. `jsonl` is the run's `metrics.jsonl`, which `penstock demo`
    and `penstock simulate` read; `tensorboard` and `wandb` need the package of that name."""
    wandb: WandbConfig = WandbConfig()
    profile: ProfileConfig = ProfileConfig()

    @property
    def needed_roles(self) -> dict[str, RoleConfig]:
        """The roles that this run uses."""
        roles = {
            "policy": self.policy,
            "reference": None if self.algorithm.kl.placement == "none" else self.reference,
            "critic": self.critic,
            "reward_model": self.reward_model,
        }
        return {name: role for name, role in roles.items() if role is not None}

    @model_validator(mode="after")
    def _critic_is_there_where_it_is_used(self) -> Self:
        name = self.algorithm.advantage.name
        if name == "gae" and self.critic is None:
            raise ValueError("advantage gae needs a critic: add `learner.critic: {}`, or choose another advantage")
        if self.critic is not None and name != "gae" and name in ADVANTAGE_NAMES:
            raise ValueError(f"advantage {name} uses no critic: leave learner.critic out, or choose advantage gae")
        if self.critic_warmup_steps and self.critic is None:
            raise ValueError("critic_warmup_steps holds the policy for a critic, and there is none: add learner.critic")
        return self

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        if self.lr_schedule != "constant" and self.num_steps <= self.warmup_steps:
            raise ValueError(f"lr_schedule {self.lr_schedule} needs num_steps above warmup_steps to know its end")
        return self

    @model_validator(mode="after")
    def _ranks_form_whole_groups(self) -> Self:
        if self.policy.num_ranks % self.sequence_parallel:
            raise ValueError("policy.num_ranks must be a multiple of sequence_parallel")
        return self

    @model_validator(mode="after")
    def _head_is_not_adapted(self) -> Self:
        if self.lora is not None and "lm_head" in self.lora.target_modules:
            raise ValueError("lora.target_modules cannot have lm_head; engines and learner adapt the layers only")
        return self
