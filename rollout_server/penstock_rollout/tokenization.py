"""Prompts to token ids and response ids to text, by the model's own tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InvalidInput
from penstock.trajectory import Prompt


class Tokenization:
    """The tokenizer of a model folder. Prompts are made to `fit`.

    Response ids are decoded for rewards only, never to be tokenized again."""

    def __init__(self, model_path: Path, fit: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda ids: ids) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path {model_path} has no usable tokenizer: {error}") from error
        self._fit = fit
        self._vocab_size = int(json.loads((model_path / "config.json").read_text())["vocab_size"])

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.token_ids:
            if not all(0 <= token < self._vocab_size for token in prompt.token_ids):
                raise InvalidInput("token_ids", f"the model has ids from 0 to {self._vocab_size - 1}")
            return self._fit(prompt.token_ids)
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        try:
            encoded = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except ValueError as error:
            raise InvalidInput("messages", f"the model's chat template refused them: {error}") from error
        return self._fit(tuple(encoded["input_ids"]))

    def text(self, token_ids: list[int]) -> str:
        decoded: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return decoded
