"""Supervised examples: reads the rows of a Parquet file as token ids. The last part of each row is trained.

| columns                | trained                                                                             |
|------------------------|-------------------------------------------------------------------------------------|
| `messages`             | the last message, which must be the assistant's, as the chat template writes it     |
| `prompt` + `response`  | the response and the end token; the prompt is text, or messages for the template    |
| `text`                 | everything but the first token, with the end token                                  |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InvalidInput
from penstock_learner.model.packing import SequenceBatch


@dataclass(frozen=True)
class Example:
    token_ids: list[int]
    prompt_length: int
    """Number of tokens at the start that are not trained; at least 1."""


def read_examples(path: Path, tokenizer: Any) -> list[Example]:
    """Every row, in the file's order. Raises InvalidInput with the row's number if a row cannot be used."""
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        first_line = str(error).splitlines()[0]
        raise InvalidInput(str(path), f"cannot be read as Parquet ({first_line}); give a Parquet file") from error
    if not rows:
        raise InvalidInput(str(path), "has no rows; nothing can be learned from it")
    return [_example(f"{path} row {number}", row, tokenizer) for number, row in enumerate(rows)]


def batch_of_examples(examples: Sequence[Example]) -> SequenceBatch:
    """Pack examples as the learner packs trajectories. Fields that only reinforcement learning needs are zero."""
    lengths = np.array([len(example.token_ids) for example in examples], dtype=np.int64)
    prompt_lengths = np.array([example.prompt_length for example in examples], dtype=np.int64)
    num_responses = int((lengths - prompt_lengths).sum())
    return SequenceBatch(
        token_ids=np.concatenate([np.array(example.token_ids, dtype=np.int64) for example in examples]),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        rewards=np.zeros(len(examples), dtype=np.float32),
        group_ids=np.arange(len(examples)),
        loss_mask=np.ones(num_responses, dtype=np.uint8),
        behaviour_log_probs=np.zeros(num_responses, dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        temperatures=np.ones(num_responses, dtype=np.float32),
    )


def _example(where: str, row: dict[str, Any], tokenizer: Any) -> Example:
    if row.get("messages"):
        prompt, whole = _chat(where, row["messages"], tokenizer)
    elif row.get("prompt") and isinstance(row.get("response"), str):
        prompt = _prompt(row["prompt"], tokenizer)
        whole = prompt + tokenizer.encode(row["response"], add_special_tokens=False) + [tokenizer.eos_token_id]
    elif isinstance(row.get("text"), str):
        whole = [*tokenizer.encode(row["text"]), tokenizer.eos_token_id]
        prompt = whole[:1]
    else:
        raise InvalidInput(where, "has no `messages`, no `prompt` with `response`, and no `text`; rename its columns")
    if not prompt or len(whole) <= len(prompt):
        raise InvalidInput(where, "has no token to train, or no token before the first trained one; remove the row")
    return Example(whole, len(prompt))


def _chat(where: str, messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[int]]:
    if messages[-1].get("role") != "assistant":
        raise InvalidInput(where, "does not end with a message of the assistant, which is the one that is trained")
    prompt = _templated(tokenizer, messages[:-1], add_generation_prompt=True)
    whole = _templated(tokenizer, messages, add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise InvalidInput(
            where, "renders to a different prompt when the answer follows; use the columns `prompt` and `response`"
        )
    return prompt, whole


def _prompt(prompt: str | list[dict[str, str]], tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        ids: list[int] = tokenizer.encode(prompt)
        return ids
    return _templated(tokenizer, prompt, add_generation_prompt=True)


def _templated(tokenizer: Any, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
