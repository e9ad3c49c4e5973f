"""Supervised examples: reads the rows of dataset files as token ids, with the tokens that are trained.

| columns                | trained                                                                              |
|------------------------|--------------------------------------------------------------------------------------|
| `messages`             | the assistant's turns, all or the last (`sft.train_on`), as the chat template writes |
| `prompt` + `response`  | the response and the end token; the prompt is text, or messages for the template     |
| `text`                 | everything but the first token, with the end token                                   |

`sft.columns` gives them other names. A row is one sequence, or several if the chat template changes earlier turns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.dataset import Files, listed_files
from penstock.config.learner import SftConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock.feed.datasets import MEDIA_COLUMNS, matching_files, read_messages, read_rows, shown_files
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_tools.sft.masks import ConversationMasks, Example

Row = tuple[Example, ...]


@dataclass(frozen=True)
class Examples:
    """The rows of a set of files."""

    rows: list[Row]
    parts: list[tuple[int, float]]
    """Number of rows and weight of each entry of the list of files."""
    num_dropped: int
    num_cut: int

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and masks, in their order, and of the weights."""
        digest = hashlib.sha256(repr(self.parts).encode())
        for row in self.rows:
            digest.update(repr(row).encode())
        return digest.hexdigest()

    def __str__(self) -> str:
        sequences = [example for row in self.rows for example in row]
        tokens = sum(len(example.token_ids) for example in sequences)
        trained = sum(example.num_trained for example in sequences)
        return (
            f"{len(self.rows)} rows in {len(sequences)} sequences, {tokens} tokens of which {trained} are trained; "
            f"{self.num_dropped} rows dropped and {self.num_cut} cut as too long"
        )


class ExampleReader:
    """Reads files with the tokenizer of the run's model."""

    def __init__(self, config: RunConfig, tokenizer: Any, context_length: int | None) -> None:
        self.sft: SftConfig = config.sft
        self.tokenizer = tokenizer
        self.max_tokens = self.sft.max_tokens or context_length
        self.masks = ConversationMasks(tokenizer, config.rollout.prompt.template_arguments)
        if self.sft.max_tokens and context_length and self.sft.max_tokens > context_length:
            raise InvalidInput(
                "sft.max_tokens", f"is {self.sft.max_tokens}, but the model's context has {context_length}; lower it"
            )

    def read(self, files: Files) -> Examples:
        """All rows, in the order of the files. Raises InvalidInput with the row's place if a row cannot be used."""
        rows: list[Row] = []
        parts: list[tuple[int, float]] = []
        num_dropped = num_cut = 0
        for entry in listed_files(files):
            first = len(rows)
            for path in matching_files(entry.file):
                for where, record in self._records(path):
                    row = self._row(where, record)
                    limited = self._limit(where, row)
                    num_cut += bool(limited) and limited != row
                    num_dropped += not limited
                    if limited:
                        rows.append(limited)
            if len(rows) > first:
                parts.append((len(rows) - first, entry.weight))
        if not rows:
            why = f" that fits into {self.max_tokens} tokens" if num_dropped else ""
            raise InvalidInput(shown_files(files), f"has no row{why}; nothing can be learned from it")
        return Examples(rows, parts, num_dropped, num_cut)

    def _records(self, path: Path) -> Iterator[tuple[str, Any]]:
        return read_rows(path, (*self.sft.columns.names, *MEDIA_COLUMNS), check=lambda names: None)

    def _row(self, where: str, row: Any) -> Row:
        if not isinstance(row, dict):
            raise InvalidInput(where, "must be an object with `messages`, `prompt` and `response`, or `text`")
        if media := [name for name in MEDIA_COLUMNS if row.get(name)]:
            raise InvalidInput(f"{where}: {media[0]}", "images, videos and audio are not supported; remove such rows")
        columns = self.sft.columns
        messages = row.get(columns.messages)
        prompt, response = _field(row, columns.prompt), _field(row, columns.response)
        text = row.get(columns.text)
        if messages:
            chat = _chat(f"{where}: {columns.messages}", messages)
            return self._checked(where, self.masks.sequences(where, chat, self._tools(where, row), self.sft.train_on))
        if prompt and isinstance(response, str):
            ids = self._prompt(where, prompt, row)
            answer = (*self.masks.encode(response), self.tokenizer.eos_token_id)
            return self._checked(where, [Example.of(ids, answer)])
        if isinstance(text, str):
            whole = (*self.tokenizer.encode(text), self.tokenizer.eos_token_id)
            return self._checked(where, [Example.of(whole[:1], whole[1:])])
        raise InvalidInput(
            where,
            f"has no `{columns.messages}`, no `{columns.prompt}` with `{columns.response}`, and no `{columns.text}`; "
            "rename its columns, or set sft.columns",
        )

    def _prompt(self, where: str, prompt: Any, row: dict[str, Any]) -> tuple[int, ...]:
        if isinstance(prompt, str) and self.sft.text_prompts == "text":
            return tuple(self.tokenizer.encode(prompt))
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        chat = _chat(f"{where}: {self.sft.columns.prompt}", prompt)
        return self.masks.prompt_ids(where, chat, self._tools(where, row))

    def _tools(self, where: str, row: dict[str, Any]) -> list[Any]:
        tools = row.get(self.sft.columns.tools) or []
        try:
            found = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError as error:
            raise InvalidInput(f"{where}: {self.sft.columns.tools}", f"is not JSON ({error}); write a list") from error
        if not isinstance(found, list):
            raise InvalidInput(f"{where}: {self.sft.columns.tools}", "must be a list of tools, or one as JSON text")
        return found

    def _checked(self, where: str, examples: list[Example]) -> Row:
        for example in examples:
            if example.loss_mask[:1] != (0,) or 1 not in example.loss_mask:
                raise InvalidInput(
                    where, "has no token to train, or no token before the first trained one; remove the row"
                )
            if None in example.token_ids:
                raise InvalidInput(where, "needs an end token, which the model's tokenizer does not have; set one")
        return tuple(examples)

    def _limit(self, where: str, row: Row) -> Row:
        """The row as `sft.too_long` has it; empty if it is dropped."""
        longest = max(len(example.token_ids) for example in row)
        if self.max_tokens is None or longest <= self.max_tokens:
            return row
        if self.sft.too_long == "error":
            raise InvalidInput(
                where,
                f"has {longest} tokens, more than {self.max_tokens}; set sft.too_long to drop or cut, or raise "
                "sft.max_tokens up to the model's context",
            )
        if self.sft.too_long == "drop":
            return ()
        cut = (Example(one.token_ids[: self.max_tokens], one.loss_mask[: self.max_tokens]) for one in row)
        return tuple(example for example in cut if 1 in example.loss_mask)


def batch_of_examples(examples: Sequence[Example]) -> SequenceBatch:
    """Pack examples as the learner packs trajectories. Fields that only reinforcement learning needs are zero."""
    lengths = np.array([len(example.token_ids) for example in examples], dtype=np.int64)
    prompt_lengths = np.array([example.prompt_length for example in examples], dtype=np.int64)
    masks = [np.array(example.loss_mask[example.prompt_length :], dtype=np.uint8) for example in examples]
    num_responses = int((lengths - prompt_lengths).sum())
    return SequenceBatch(
        token_ids=np.concatenate([np.array(example.token_ids, dtype=np.int64) for example in examples]),
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        rewards=np.zeros(len(examples), dtype=np.float32),
        group_ids=np.arange(len(examples)),
        loss_mask=np.concatenate(masks),
        behaviour_log_probs=np.zeros(num_responses, dtype=np.float32),
        token_versions=np.zeros(num_responses, dtype=np.int64),
        temperatures=np.ones(num_responses, dtype=np.float32),
    )


def _field(row: dict[str, Any], column: str) -> Any:
    """The value of a column, or of a field of it: `extra_info.question`."""
    name, _, inner = column.partition(".")
    value = row.get(name)
    return value.get(inner) if inner and isinstance(value, dict) else None if inner else value


def _chat(where: str, value: Any) -> list[dict[str, Any]]:
    """The messages with all their fields."""
    messages, further = read_messages(where, value)
    return [
        {"role": role, "content": content, **further.get(index, {})} for index, (role, content) in enumerate(messages)
    ]
