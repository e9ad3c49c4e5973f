"""Configuration of the learner: placement, optimizer, batches, checkpoints."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config.algorithms import AlgorithmConfig
from penstock.config.base import Config


class RoleConfig(Config):
    num_ranks: int = Field(default=1, ge=1)
    cpus_per_rank: float = Field(default=1.0, ge=0)
    gpus_per_rank: float = Field(default=0.0, ge=0)


class LoraConfig(Config):
    rank: int = Field(ge=1)
    alpha: int = Field(gt=0)
    """The adapter is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class CheckpointConfig(Config):
    every_steps: int = Field(default=25, ge=1)
    """Groups are acknowledged only once a checkpoint covers them, so this also bounds what a crash repeats."""
    keep: int = Field(default=2, ge=1)
    resume: Literal["auto", "off"] = "auto"
    """`auto` continues from the newest checkpoint of the run's folder."""


class LearnerConfig(Config):
    placement: Literal["standalone", "split-collocate"] = "standalone"
    """`standalone`: every role in a resource group of its own. `split-collocate`: policy and reference share one."""
    policy: RoleConfig = RoleConfig()
    reference: RoleConfig = RoleConfig()
    ray_address: str = ""
    """Ray cluster to join; empty starts a private one on this machine."""
    publish_host: str = ""
    """Address at which rollout servers meet the publisher for a weight transfer; empty takes that of the Ray node on
    which the publisher runs."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Where /metrics is served; 0 takes a free port and writes it to the run's folder."""
    num_steps: int = Field(default=100, ge=0)
    """Optimizer steps of the run; 0 trains until it is stopped."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """The learning rate grows linearly over these steps."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    checkpoint: CheckpointConfig = CheckpointConfig()
    lora: LoraConfig | None = None
    """Train a low-rank adapter instead of the whole model; a push then carries the adapter only."""
    micro_batch_tokens: int = Field(default=16384, ge=16)
    """Token budget of one forward and backward pass."""
    logprob_chunk_tokens: int = Field(default=2048, ge=16)
    """Tokens whose logits exist at one time."""
    max_logprob_mismatch_nats: float = Field(default=0.1, ge=0)
    """Mean difference of the engines' and the learner's log-probs on the same weights above which the learner refuses
    to train, by the first step that can be compared. 0 never refuses. Typical: 1e-5 in float32, 0.01 in bfloat16."""
    batch_timeout_s: float = Field(default=1800.0, gt=0)
    """The learner stops with an error when a full batch has not arrived by then."""
    rank_timeout_s: float = Field(default=600.0, gt=0)
    """Deadline of one call to a role's ranks, collectives included."""
    peak_flops_per_rank: float = Field(default=0.0, ge=0)
    """What the device of one policy rank can do in a second, for `penstock_learner_mfu_ratio`. 0 takes the dense
    bfloat16 figure of a GPU that is known; the ratio is 0 where there is none."""
    threads_per_rank: int = Field(default=1, ge=1)
    """CPU threads of each rank."""

    @model_validator(mode="after")
    def _advantage_has_what_it_needs(self) -> Self:
        needs = {"gae": "a critic role", "remax": "a greedy sample in each group"}.get(self.algorithm.advantage.name)
        if needs:
            raise ValueError(f"advantage {self.algorithm.advantage.name} needs {needs}, which this version has not")
        return self
