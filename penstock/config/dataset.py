"""Configuration of the training and validation datasets of a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from penstock.config.base import Config


class ValidationConfig(Config):
    """A held-out dataset that is scored while the run trains, with its own sampling parameters."""

    file: Path | None = None
    """Dataset in the same formats as the training file. None: no validation."""
    every_steps: int = Field(default=25, ge=1)
    """Number of steps between two validations. The first one runs before the first step."""
    num_samples: int = Field(default=1, ge=1)
    """Number of samples per prompt: the k of mean@k, and the largest k of pass@k."""
    pinned: bool = True
    """Hold one rollout server at the version it serves, and let it answer the whole dataset while the other servers
    follow training. If false, or if there is only one server, all servers answer it alongside training, and its samples
    may come from several versions."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature. 0 is greedy decoding."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities add up to this. 1 turns it off."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in a response."""


class DatasetConfig(Config):
    """The dataset that `penstock up` and `penstock feed` submit. Without a file, only clients submit prompts."""

    file: Path | None = None
    """Parquet or JSONL file with verl's columns, or a folder written by Hugging Face's `save_to_disk`."""
    name: str = Field(default="train", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name under which the queue stores how far the dataset has been submitted. A restarted run continues from there
    and refuses different data under the same name; give changed data a new name."""
    epochs: int = Field(default=1, ge=0)
    """Number of passes over the data. 0: repeat until the run ends."""
    shuffle: bool = True
    """Submit each epoch in a different random order, which is determined by the seed."""
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of the shuffle. None: the run's `seed`."""
    max_pending: int = Field(default=512, ge=1)
    """Upper bound on prompts that wait in the queue. Submission pauses while it is reached."""
    max_buried_share: float | None = Field(default=0.5, gt=0, le=1)
    """Share of prompts that are dead-lettered for one reason, such as `prompt_too_long`, at which the run pauses. At
    least 32 prompts must have that reason. None: the run never pauses for that."""
    num_samples: int = Field(default=8, ge=1)
    """Number of samples per prompt, which is the size of a group."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature. 1 samples from the model's own distribution, as on-policy training expects."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens whose probabilities add up to this. 1 turns it off."""
    max_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in a response."""
    validation: ValidationConfig = ValidationConfig()
