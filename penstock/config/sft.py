"""Configuration of supervised fine-tuning (`penstock sft`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.config.base import Config
from penstock.config.dataset import Files, listed_files


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
