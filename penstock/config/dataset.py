"""Configuration of the training and validation datasets of a run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.config.base import Config
from penstock.sampling import Sampling, SamplingParameters


class WeightedFile(Config):
    """A dataset file, or several of them by a pattern, with its share of an epoch."""

    file: Path
    """File, folder, pattern or Hub id, as in `dataset.file`."""
    weight: float = Field(default=1.0, gt=0)
    """How often an epoch has each of its rows: 2 is twice, and 0.5 is a different half of the rows in each epoch."""


Files = Path | tuple[Path | WeightedFile, ...]


class ColumnsConfig(Config):
    """Names of the columns that a dataset has. They are verl's by default."""

    prompt: str = "prompt"
    """List of messages, or a text, which becomes one user message."""
    data_source: str = "data_source"
    """Name that chooses the reward. A dataset without this column gets `dataset.data_source`."""
    ground_truth: str = "reward_model.ground_truth"
    """What the reward compares with. A dot looks into an object."""
    extra_info: str = "extra_info"
    """Object that the reward gets unchanged."""
    agent_name: str = "agent_name"
    """Agent loop of the row."""

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that are read."""
        fields = (self.prompt, self.data_source, self.ground_truth, self.extra_info, self.agent_name)
        return tuple(dict.fromkeys(field.partition(".")[0] for field in fields))


class SamplingConfig(Config, SamplingParameters):  # type: ignore[misc]  # mypy does not know that it is frozen
    """Sampling parameters of a dataset."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(SamplingParameters)})


class ValidationConfig(SamplingConfig):  # type: ignore[misc]  # mypy does not know that it is frozen
    """A held-out dataset that is scored while the run trains, with its own sampling parameters."""

    file: Files | None = None
    """Dataset in the same formats as the training file, with the same columns and loader. None: no validation."""
    every_steps: int = Field(default=25, ge=1)
    """Number of steps between two validations. The policy after the last step is validated in any case."""
    before_train: bool = True
    """Validate before the first step too (verl's `val_before_train`)."""
    only: bool = False
    """Validate the model, or the newest checkpoint of the run, and finish without training (verl's `val_only`)."""
    last_timeout_s: float = Field(default=1800.0, ge=0)
    """How long the learner waits at the end of the run for the validation of the last policy, so that its scores reach
    the loggers. 0: it does not wait."""
    num_samples: int = Field(default=1, ge=1)
    """Number of samples per prompt: the k of mean@k, and the largest k of pass@k."""
    pinned: bool = True
    """Hold one rollout server at the version it serves, and let it answer the whole dataset while the other servers
    follow training. If false, or if there is only one server, all servers answer it alongside training, and its samples
    may come from several versions."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Sampling temperature. 0 is greedy decoding."""

    @model_validator(mode="after")
    def _has_a_file_if_nothing_else_is_done(self) -> ValidationConfig:
        if self.only and self.file is None:
            raise ValueError("only: needs the file to validate on")
        return self


class DatasetConfig(SamplingConfig):  # type: ignore[misc]  # mypy does not know that it is frozen
    """The dataset that `penstock up` and `penstock feed` submit. Without a file, only clients submit prompts."""

    file: Files | None = None
    """Parquet or JSONL file with verl's columns, a folder written by Hugging Face's `save_to_disk`, a pattern such as
    `data/*.parquet`, a Hub id such as `openai/gsm8k` or `openai/gsm8k/main/train`, or a list of these. An entry of a
    list may have a weight: `[a.parquet, {file: b.parquet, weight: 0.5}]`."""
    columns: ColumnsConfig = ColumnsConfig()
    data_source: str = ""
    """Data source of rows that have none. Empty: for a Hub id, the id."""
    loader: str = ""
    """Function or class of your own, as `FILE:NAME` or `PACKAGE.MODULE:NAME`. It is called with `files`, a list of
    paths, and with `loader_kwargs`. It returns the rows: anything that can be iterated over, with one object per row.
    Empty: the files are read as they are."""
    loader_kwargs: dict[str, Any] = {}
    """Further keyword arguments of `loader`."""
    sampler: str = ""
    """Class of your own, as `FILE:NAME` or `PACKAGE.MODULE:NAME`, that chooses the rows to train on next and sees the
    rewards of each row: a curriculum. Empty: the order of `shuffle`."""
    sampler_kwargs: dict[str, Any] = {}
    """Further keyword arguments of `sampler`."""
    name: str = Field(default="train", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name under which the queue stores how far the dataset has been submitted. A restarted run continues from there
    and refuses different data under the same name; give changed data a new name."""
    epochs: int = Field(default=1, ge=0)
    """Number of passes over the data. The run finishes after the last one, or after `learner.num_steps`. 0: repeat
    until the run ends."""
    last_batch: Literal["train", "drop"] = "train"
    """What happens at the end of the last epoch to prompts that do not fill a batch. `train` makes one more, smaller
    step with them; `drop` does not train on them."""
    shuffle: bool = True
    """Submit each epoch in a different random order, which is determined by the seed."""
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of the shuffle. None: the run's `seed`."""
    max_pending: int = Field(default=512, ge=1)
    """Upper bound on prompts that wait in the queue. Submission pauses while it is reached."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics and the probes of `penstock feed` listen on."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics and the probes of `penstock feed`. 0: take a free port and write it to `feed-NAME.json` in the
    run's folder, where NAME is the dataset's."""
    max_buried_share: float | None = Field(default=0.5, gt=0, le=1)
    """Share of prompts that are dead-lettered for one reason, such as `prompt_too_long`, at which the run pauses. At
    least 32 prompts must have that reason. None: the run never pauses for that."""
    num_samples: int = Field(default=8, ge=1)
    """Number of samples per prompt, which is the size of a group."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature. 1 samples from the model's own distribution, as on-policy training expects."""
    validation: ValidationConfig = ValidationConfig()

    @model_validator(mode="after")
    def _weights_have_an_effect(self) -> DatasetConfig:
        if self.loader and _has_weights(self.file):
            raise ValueError("file: the rows of a loader have no weights; leave the weights out, or repeat rows there")
        if _has_weights(self.validation.file):
            raise ValueError("validation.file: every row is validated once, so it takes no weights")
        return self


def _has_weights(files: Files | None) -> bool:
    return any(entry.weight != 1 for entry in listed_files(files))


def listed_files(files: Files | None) -> tuple[WeightedFile, ...]:
    """The entries of `file`, each with its weight."""
    entries = () if files is None else (files,) if isinstance(files, Path) else files
    return tuple(entry if isinstance(entry, WeightedFile) else WeightedFile(file=entry) for entry in entries)
