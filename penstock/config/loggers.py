"""Configuration of the learner's step loggers and profiler."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from penstock.config.base import Config

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
