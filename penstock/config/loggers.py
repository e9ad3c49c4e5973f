"""Configuration of the learner's loggers and profiles."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.config.base import Config

LoggerName = Literal["console", "jsonl", "tensorboard", "wandb"]


class WandbConfig(Config):
    """Of the logger `wandb`. Its key comes from WANDB_API_KEY or `wandb login`."""

    project: str = Field(default="penstock", min_length=1)
    entity: str = ""
    """Team or user; empty: the key's own."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to `wandb/` of the run's folder, for `wandb sync`."""


class ProfileConfig(Config):
    """Traces of where the learner's time goes, in `profiles/` of the run's folder."""

    steps: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Steps whose updates and forward passes the torch profiler records, a Chrome trace for each rank. Empty: none."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    """Ranks of each role that are recorded."""
    ray_timeline: bool = False
    """Write Ray's timeline of all calls when the learner ends."""

    @model_validator(mode="after")
    def _ranks_are_named(self) -> Self:
        if self.steps and not self.ranks:
            raise ValueError("profile.steps are recorded on no rank: name some in profile.ranks")
        return self
