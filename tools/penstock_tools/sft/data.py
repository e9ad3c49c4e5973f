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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from penstock.config.dataset import Files, listed_files
from penstock.config.learner import SftConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput, one_line
from penstock.feed.datasets import MEDIA_COLUMNS, matching_files, nested_field, read_messages, read_rows, shown_files
from penstock.trajectory import Prompt
from penstock_learner.batches.sequence_batch import SequenceBatch, unsampled_batch
from penstock_rollout.tokenization import with_argument_objects

# ── which tokens of a conversation are trained ──


Message = Mapping[str, Any]
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Example:
    """One sequence, and which of its tokens are trained."""

    token_ids: Tokens
    loss_mask: Tokens
    """1 for each trained token, else 0. The first token cannot be trained: nothing precedes it."""

    @property
    def prompt_length(self) -> int:
        return self.loss_mask.index(1)

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)

    @classmethod
    def of(cls, prompt: Sequence[int], trained: Sequence[int]) -> Example:
        return cls((*prompt, *trained), (0,) * len(prompt) + (1,) * len(trained))


class ConversationMasks:
    """Makes sequences of conversations with one tokenizer and its chat template.

    A trained turn has the prompt that an engine would get for it: the messages before it, as the chat template writes
    them with the start of the assistant's next turn. What the template writes after that for the turn is trained:

        <|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n<|im_start|>user\\n…
        └───────────────── prompt ─────────────────────┘└── trained ──┘└───────── prompt …

    Turns share a sequence as long as the prompt of the next turn begins with exactly the tokens so far. Some templates
    change earlier turns, for example drop their reasoning; then a new sequence begins with the prompt of that turn. So
    every trained token is preceded by what precedes it in a rollout, whatever the template does."""

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template_arguments = dict(template_arguments)

    def sequences(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any], train_on: Literal["all", "last"]
    ) -> list[Example]:
        """The sequences of a conversation. Messages after its last trained turn have no effect, and are skipped.

        Raises InvalidInput, which names the row as `where`, if it has no trained turn, or if the template does not let
        a turn be distinguished from its prompt."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InvalidInput(where, "has no message of the assistant, so nothing can be trained; remove the row")
        if turns[0] == 0:
            raise InvalidInput(where, "begins with a message of the assistant, which has no prompt; put one before it")
        if train_on == "last":
            if turns[-1] != len(messages) - 1:
                raise InvalidInput(where, "does not end with a message of the assistant, which sft.train_on last needs")
            turns = turns[-1:]
        found: list[Example] = []
        for index in turns:
            prompt, turn = self._turn(where, messages[: index + 1], tools)
            trained_before: Tokens = ()
            if found and prompt[: len(found[-1].token_ids)] == found[-1].token_ids:
                trained_before = found.pop().loss_mask
            untrained = (0,) * (len(prompt) - len(trained_before))
            found.append(Example((*prompt, *turn), (*trained_before, *untrained, *(1 for _ in turn))))
        return found

    def prompt_ids(self, where: str, messages: Sequence[Message], tools: Sequence[Any]) -> Tokens:
        """The tokens of a conversation up to the start of the assistant's next turn."""
        return self.encode(self._render(where, messages, tools, add_generation_prompt=True))

    def encode(self, text: str) -> Tokens:
        """The tokens of a text alone, without the tokens that a tokenizer puts around it."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _turn(self, where: str, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[Tokens, Tokens]:
        """The tokens of the prompt of the last message, and the tokens of the message."""
        prompt = self._render(where, messages[:-1], tools, add_generation_prompt=True)
        whole = self._render(where, messages, tools, add_generation_prompt=False)
        if not whole.startswith(prompt) or whole == prompt:
            raise InvalidInput(
                where,
                f"the chat template writes message {len(messages) - 1} in a way that does not follow from its prompt, "
                "so its tokens cannot be identified; use the columns `prompt` and `response`, or another template",
            )
        prompt_ids, whole_ids = self.encode(prompt), self.encode(whole)
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, whole_ids[len(prompt_ids) :]
        # The tokenizer merges across the boundary. A model that gets the prompt alone writes the turn by itself.
        turn_ids = self.encode(whole[len(prompt) :])
        exactly = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        if self._tokenizer.decode([*prompt_ids, *turn_ids], **exactly) != self._tokenizer.decode(whole_ids, **exactly):
            raise InvalidInput(
                where,
                f"the tokenizer writes message {len(messages) - 1} differently after its prompt than alone; use the "
                "columns `prompt` and `response`",
            )
        return prompt_ids, turn_ids

    def _render(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool
    ) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidInput(
                where, "has messages, but the model's tokenizer has no chat template; use `prompt` and `response`"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [with_argument_objects(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_arguments,
            )
        except Exception as error:  # a template is code that comes with the model
            raise InvalidInput(where, f"the model's chat template cannot render it: {one_line(error)}") from error
        return text


Row = tuple[Example, ...]


@dataclass(frozen=True)
class Examples:
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
                names = (*self.sft.columns.names, *MEDIA_COLUMNS)
                for where, record in read_rows(path, names, check=lambda names: None):
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

    def _row(self, where: str, row: Any) -> Row:
        if not isinstance(row, dict):
            raise InvalidInput(where, "must be an object with `messages`, `prompt` and `response`, or `text`")
        if media := [name for name in MEDIA_COLUMNS if row.get(name)]:
            raise InvalidInput(f"{where}: {media[0]}", "images, videos and audio are not supported; remove such rows")
        columns = self.sft.columns
        messages = row.get(columns.messages)
        prompt, response = nested_field(where, row, columns.prompt), nested_field(where, row, columns.response)
        text = row.get(columns.text)
        if messages:
            chat = _chat(f"{where}: {columns.messages}", messages)
            examples = self.masks.sequences(where, chat, self._tools(where, row), self.sft.train_on)
        elif prompt and isinstance(response, str):
            answer = (*self.masks.encode(response), self.tokenizer.eos_token_id)
            examples = [Example.of(self._prompt(where, prompt, row), answer)]
        elif isinstance(text, str):
            whole = (*self.tokenizer.encode(text), self.tokenizer.eos_token_id)
            examples = [Example.of(whole[:1], whole[1:])]
        else:
            raise InvalidInput(
                where,
                f"has no `{columns.messages}`, no `{columns.prompt}` with `{columns.response}`, and no "
                f"`{columns.text}`; rename its columns, or set sft.columns",
            )
        for example in examples:
            if example.loss_mask[:1] != (0,) or 1 not in example.loss_mask:
                raise InvalidInput(
                    where, "has no token to train, or no token before the first trained one; remove the row"
                )
            if None in example.token_ids:
                raise InvalidInput(where, "needs an end token, which the model's tokenizer does not have; set one")
        return tuple(examples)

    def _prompt(self, where: str, prompt: Any, row: dict[str, Any]) -> Tokens:
        if isinstance(prompt, str) and self.sft.text_prompts == "text":
            return tuple(self.tokenizer.encode(prompt))
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
    token_ids = np.concatenate([np.array(example.token_ids, dtype=np.int64) for example in examples])
    batch = unsampled_batch(token_ids, lengths, prompt_lengths, np.arange(len(examples)))
    return replace(batch, loss_mask=np.concatenate(masks))


def _chat(where: str, value: Any) -> list[dict[str, Any]]:
    messages, further = read_messages(where, value)
    return Prompt(messages, further).chat
