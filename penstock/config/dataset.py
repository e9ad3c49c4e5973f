"""Configuration of the datasets that a run is fed with and validated on."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.config.base import Config


class ValidationConfig(Config):
    """A held-out dataset, scored beside training with sampling of its own."""

    file: Path | None = None
    """Dataset, as for training; None: no validation."""
    every_steps: int = Field(default=25, ge=1)
    """It is scored before the first step, and at every multiple of this."""
    num_samples: int = Field(default=1, ge=1)
    """Samples of each prompt: the k of mean@k, and the largest of pass@k."""
    pinned: bool = True
    """One server is held at the version it serves and answers all of it, while the others follow training. With one
    server alone, or where false, every server answers beside training, and samples may be of several versions."""
    temperature: float = Field(default=1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=256, ge=1)


class DatasetConfig(Config):
    """What `penstock up` and `penstock feed` submit. Without a file, prompts come from clients alone."""

    file: Path | None = None
    """Parquet or JSONL with verl's columns, or a folder that `save_to_disk` wrote."""
    name: str = Field(default="train", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Under which the queue keeps the position. A run continues a name with the same data only."""
    epochs: int = Field(default=1, ge=0)
    """Passes over the data; 0: without end."""
    shuffle: bool = True
    """Each epoch in an order of its own, which follows from the seed."""
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """None: `seed`."""
    max_pending: int = Field(default=512, ge=1)
    """More is submitted while fewer prompts than this wait."""
    num_samples: int = Field(default=8, ge=1)
    """Samples of each prompt: the size of a group."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_tokens: int = Field(default=256, ge=1)
    """Longest response."""
    validation: ValidationConfig = ValidationConfig()
