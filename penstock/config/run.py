"""The whole configuration of a run: one YAML file, the same for every process."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config.base import Config
from penstock.config.dataset import DatasetConfig
from penstock.config.learner import LearnerConfig
from penstock.config.rollout import RolloutConfig
from penstock.config.service import DemoConfig, GatewayConfig, LauncherConfig, RedisConfig, ReplayConfig
from penstock.config.tracing import TracingConfig
from penstock.config.weights import WeightsConfig


class ModelConfig(Config):
    path: Path
    """Folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Compute type of the engines, and what weights are pushed in."""


class RunConfig(Config):
    run: str = Field(default="run", pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")
    """Name of the run; part of every Redis key, so many runs share one Redis."""
    run_dir: Path = Path("runs")
    """Checkpoints, logs and the private Redis' data of run NAME live in run_dir/NAME."""
    seed: int = 1
    """Seeds sampling, data order and the learner."""
    model: ModelConfig
    dataset: DatasetConfig = DatasetConfig()
    redis: RedisConfig = RedisConfig()
    replay: ReplayConfig = ReplayConfig()
    gateway: GatewayConfig = GatewayConfig()
    launcher: LauncherConfig = LauncherConfig()
    rollout: RolloutConfig = RolloutConfig()
    weights: WeightsConfig = WeightsConfig()
    learner: LearnerConfig = LearnerConfig()
    tracing: TracingConfig = TracingConfig()
    demo: DemoConfig = DemoConfig()

    @model_validator(mode="after")
    def _reward_model_is_there_where_it_is_used(self) -> Self:
        reward = self.rollout.reward
        kinds = {chosen.kind for chosen in (*reward.by_data_source.values(), reward.default)}
        if "reward_model" in kinds and self.learner.reward_model is None:
            raise ValueError("a reward of kind reward_model is the learner's to give: add learner.reward_model.path")
        return self

    @model_validator(mode="after")
    def _spread_is_of_the_reward_that_trains(self) -> Self:
        reward_model = self.learner.reward_model
        if self.replay.dynamic_sampling and reward_model is not None and reward_model.combine == "replace":
            raise ValueError(
                "replay.dynamic_sampling compares the rewards of the rollout servers, which learner.reward_model "
                "replaces: turn one of them off"
            )
        return self

    @property
    def folder(self) -> Path:
        return self.run_dir / self.run
