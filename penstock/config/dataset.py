"""Configuration of the training and validation datasets of a run."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from penstock.config.base import Config
from penstock.sampling import Sampling, SamplingParameters


def _no_url(file: object) -> object:
    if re.match(r"[a-z][a-z0-9+.-]*:/", str(file)):
        raise ValueError(
            f"{file} is a URL, and datasets are read from files: download it and give its path; on Kubernetes, that of "
            "a file on the claim storage.data.existingClaim"
        )
    return file


File = Annotated[Path, BeforeValidator(_no_url)]


class WeightedFile(Config):
    """A dataset file, or several of them by a pattern, with its share of an epoch."""

    file: File
    """File, folder, pattern or Hub id, as in `dataset.file`."""
    weight: float = Field(default=1.0, gt=0)
    """How often an epoch has each row: 2 is twice, and 0.5 is a different half of the rows in each epoch."""


Files = File | tuple[File | WeightedFile, ...]


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
        return tuple(dict.fromkeys(column.partition(".")[0] for column in self.model_dump().values()))


class SamplingConfig(Config, SamplingParameters):  # type: ignore[misc]  # mypy does not know that it is frozen
    """Sampling parameters of a dataset."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{field.name: getattr(self, field.name) for field in fields(SamplingParameters)})


class ValidationConfig(SamplingConfig):  # type: ignore[misc]  # mypy does not know that it is frozen
    """A held-out dataset that is scored while the run trains, with its own sampling parameters."""

    file: Files | None = None
    """Dataset in the same formats as the training file, with the same columns and loader. None means no validation."""
    every_steps: int = Field(default=25, ge=1)
    """Steps between two validations. The policy after the last step is always validated."""
    before_train: bool = True
    """Validate before the first step too (verl's `val_before_train`)."""
    only: bool = False
    """Validate the model, or the newest checkpoint of the run, and finish without training (verl's `val_only`)."""
    last_timeout_s: float = Field(default=1800.0, ge=0)
    """How long the learner waits at the end of the run for the last validation's scores. 0 does not wait."""
    num_samples: int = Field(default=1, ge=1)
    """Number of samples per prompt: the k of mean@k, and the largest k of pass@k."""
    score: str = ""
    """Part of the reward, such as `acc`, that pass@k counts. Empty means the reward itself."""
    pinned: bool = True
    """Let one server answer the whole dataset with one version while the others follow training. If false, or with only
    one server, its samples may span versions."""
    temperature: float = Field(default=1.0, ge=0, le=100)
    """Sampling temperature. 0 is greedy decoding."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return (
            (self.only and self.file is None, "only: needs the file to validate on"),
            (self.temperature == 0 and self.num_samples > 1,
             f"temperature 0 gives the same answer {self.num_samples} times: raise it, or set num_samples to 1"),
        )  # fmt: skip


class DatasetConfig(SamplingConfig):  # type: ignore[misc]  # mypy does not know that it is frozen
    """The dataset that `penstock up` and `penstock feed` submit. Without a file, only clients submit prompts."""

    file: Files | None = None
    """Parquet or JSONL file with verl's columns, a folder written by Hugging Face's `save_to_disk`, a pattern such as
    `data/*.parquet`, a Hub id such as `openai/gsm8k/main/train`, or a list of these, each with an optional weight:
    `[a.parquet, {file: b.parquet, weight: 0.5}]`."""
    columns: ColumnsConfig = ColumnsConfig()
    data_source: str = ""
    """Data source of rows that have none. Empty means the Hub id, if there is one."""
    loader: str = ""
    """Your own function or class, as `FILE:NAME` or `PACKAGE.MODULE:NAME`. It is called with `files`, a list of paths,
    and `loader_kwargs`, and returns an iterable of rows. Empty means the files are read as they are."""
    loader_kwargs: dict[str, Any] = {}
    """Further keyword arguments of `loader`."""
    sampler: str = ""
    """Your own class, as `FILE:NAME` or `PACKAGE.MODULE:NAME`, that chooses rows and sees their rewards (a curriculum).
    Empty means the order of `shuffle`."""
    sampler_kwargs: dict[str, Any] = {}
    """Further keyword arguments of `sampler`."""
    name: str = Field(default="train", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name under which the queue stores the dataset's position. Other data under the same name is refused."""
    epochs: int = Field(default=1, ge=0)
    """Number of passes over the data, after which the run finishes. 0 repeats the data until the run ends."""
    last_batch: Literal["train", "drop"] = "train"
    """Whether prompts that do not fill the last batch make one more, smaller step (`train`) or are dropped (`drop`)."""
    shuffle: bool = True
    """Submit each epoch in a different random order, which is determined by the seed."""
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Seed of the shuffle. None means the run's `seed`."""
    max_pending: int = Field(default=512, ge=1)
    """Upper bound on prompts that wait in the queue. Submission pauses while it is reached."""
    metrics_host: str = "127.0.0.1"
    """Address that /metrics and the probes of `penstock feed` listen on."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of /metrics and the probes of `penstock feed`. 0 takes a free port; `feed-NAME.json` of the run has it."""
    max_dead_letter_share: float | None = Field(default=0.5, gt=0, le=1)
    """The run pauses if this share of prompts, and at least 32 of them, is dead-lettered for one reason, such as
    `prompt_too_long`. None means it never does."""
    num_samples: int = Field(default=8, ge=1)
    """Number of samples per prompt, which is the size of a group."""
    temperature: float = Field(default=1.0, gt=0, le=100)
    """Sampling temperature. 1 samples from the model's own distribution, as on-policy training expects."""
    validation: ValidationConfig = ValidationConfig()

    def refused(self) -> tuple[tuple[object, str], ...]:
        text = "file: the rows of a loader have no weights; remove the weights, or repeat rows there"
        taken = "name: names that begin with upload- are those of uploaded datasets; choose another"
        has_taken = self.name.startswith("upload-")
        return (self.loader and has_weights(self.file), text), refused_weights(self.validation.file), (has_taken, taken)


def refused_weights(files: Files | None) -> tuple[bool, str]:
    return has_weights(files), "validation.file: every row is validated once, so it takes no weights"


def has_weights(files: Files | None) -> bool:
    return any(entry.weight != 1 for entry in listed_files(files))


def listed_files(files: Files | None) -> tuple[WeightedFile, ...]:
    """The entries of `file`, each with its weight."""
    entries = () if files is None else (files,) if isinstance(files, Path) else files
    return tuple(entry if isinstance(entry, WeightedFile) else WeightedFile(file=entry) for entry in entries)
