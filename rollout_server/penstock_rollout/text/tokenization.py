"""Encodes prompts and decodes responses with the model's tokenizer."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InvalidInput
from penstock.trajectory import Prompt
from penstock.weights.folder_tensors import stop_token_ids
from penstock_rollout.text.chat_turns import ChatTurns, Message

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's function format, as chat templates take them."""


def _whole(ids: tuple[int, ...]) -> tuple[int, ...]:
    return ids


class Tokenization:
    """The tokenizer of a model folder. `fit` shortens or refuses long prompts.

    Decoded responses are for reading and scoring. They are never encoded again."""

    def __init__(
        self, model_path: Path, fit: Callable[[tuple[int, ...]], tuple[int, ...]] = _whole,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path {model_path} has no usable tokenizer: {error}") from error
        self._fit = fit
        self._vocab_size = int(json.loads((model_path / "config.json").read_text())["vocab_size"])
        self.stop_ids = frozenset(stop_token_ids(model_path))
        """Ids that end a turn. Engines keep the sampled stop token as the last token of a turn."""
        self._turns = ChatTurns(self._tokenizer, self.stop_ids, template_arguments)

    def without_limit(self) -> Tokenization:
        """The same for generate calls. `rollout.prompt` is for the prompts of the queue. A call that is too long for
        the model is refused, never truncated, and its history may be longer than a prompt of the queue."""
        unlimited = copy.copy(self)
        unlimited._fit = _whole
        return unlimited

    def prompt_ids(
        self, prompt: Prompt, tools: ToolSchemas = (), template_arguments: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """Encode the prompt of the first turn. If it consists of messages, the template shows `tools` to the model, and
        `template_arguments` win over those of the run's config."""
        if prompt.token_ids:
            if not all(0 <= token < self._vocab_size for token in prompt.token_ids):
                raise InvalidInput("token_ids", f"the model has ids from 0 to {self._vocab_size - 1}")
            return self._fit(prompt.token_ids)
        ids = self._turns.prompt_ids(prompt.chat, tools, template_arguments)
        if not ids:
            raise InvalidInput("messages", "the model's chat template renders them as nothing")
        return self._fit(ids)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Encode plain text without a chat template, with the special tokens that the tokenizer adds itself."""
        return self._fit(tuple(self._tokenizer(text)["input_ids"]))

    def continued_ids(
        self, history: tuple[int, ...], messages: Sequence[Message], tools: ToolSchemas = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """The ids of a sampled conversation and of the `messages` after it. The history is not encoded again."""
        return self._fit((*history, *self._turns.next_ids(history[-1], messages, tools, template_arguments)))

    def continued_text_ids(self, history: tuple[int, ...], text: str) -> tuple[int, ...]:
        """The ids of a sampled conversation and of the plain text after it. The history is not encoded again.

        The stop token that ended the answer is not part of the text that a client has seen. It stays if the text goes
        on with it, as a rendered chat does, and is left out otherwise."""
        if history[-1] in self.stop_ids:
            stop = self._tokenizer.decode([history[-1]], skip_special_tokens=False)
            history, text = (history, text[len(stop) :]) if text.startswith(stop) else (history[:-1], text)
        return self._fit((*history, *self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    def next_ids(self, last_sampled: int, messages: Sequence[Message], tools: ToolSchemas = ()) -> tuple[int, ...]:
        """The ids between a turn that ended with `last_sampled` and the next turn, with `messages` between them."""
        return self._turns.next_ids(last_sampled, messages, tools)

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer itself, for the parsers and the constraints of engines."""
        return self._tokenizer

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens."""
        decoded: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return decoded

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens, which tool calls may contain, but without stop tokens at the end."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        decoded: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return decoded
