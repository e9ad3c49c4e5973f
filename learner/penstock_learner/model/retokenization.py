"""Samples as another model reads them: their text, in that model's chat template and tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock_learner.batches.sequence_batch import SequenceBatch

_MARK = "PENSTOCK_QUESTION"


class Retokenization:
    """Translates sequences of the policy's tokens into those of another model, by way of their text.

    The prompt becomes the user's message and the response the assistant's, in the other model's chat template. The
    message is found by the policy's own template; a prompt of several messages is given whole, as the policy's template
    has rendered it. A model without a template reads prompt and response as plain text."""

    def __init__(self, policy_path: Path, own_path: Path, key: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._policy: Any = AutoTokenizer.from_pretrained(policy_path, local_files_only=True)
            self._own: Any = AutoTokenizer.from_pretrained(own_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key} {own_path} or model.path has no usable tokenizer: {error}") from error
        self._before, self._after = self._around_question()

    def __call__(self, batch: SequenceBatch) -> SequenceBatch:
        """The same sequences in the other model's tokens. Use it for forward passes only: the [T] arrays do not
        change."""
        encoded, start = [], 0
        for length, prompt_length in zip(batch.lengths.tolist(), batch.prompt_lengths.tolist(), strict=True):
            prompt = batch.token_ids[start : start + prompt_length].tolist()
            response = batch.token_ids[start + prompt_length : start + length].tolist()
            encoded.append(self._encode(prompt, response))
            start += length
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return replace(
            batch, token_ids=np.concatenate(encoded), lengths=lengths, prompt_lengths=lengths - 1, routed_experts=None
        )

    def text(self, prompt: list[int], response: list[int]) -> str:
        """What the other model reads."""
        answer = self._policy.decode(response, skip_special_tokens=True)
        rendered = self._policy.decode(prompt, skip_special_tokens=False)
        if not getattr(self._own, "chat_template", None):
            return f"{self._policy.decode(prompt, skip_special_tokens=True)}{answer}"
        chat = [{"role": "user", "content": self._question(rendered)}, {"role": "assistant", "content": answer}]
        text: str = self._own.apply_chat_template(chat, tokenize=False)
        return text

    def _encode(self, prompt: list[int], response: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
        has_template = bool(getattr(self._own, "chat_template", None))
        ids = self._own(self.text(prompt, response), add_special_tokens=not has_template)["input_ids"]
        return np.asarray(ids, dtype=np.int64)

    def _question(self, rendered: str) -> str:
        """The user's message in a prompt that the policy's template has rendered."""
        is_known = self._before and rendered.startswith(self._before) and rendered.endswith(self._after)
        return rendered[len(self._before) : len(rendered) - len(self._after)] if is_known else rendered

    def _around_question(self) -> tuple[str, str]:
        """What the policy's template puts before and after the only message of a user."""
        if not getattr(self._policy, "chat_template", None):
            return "", ""
        chat = [{"role": "user", "content": _MARK}]
        before, _, after = self._policy.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).partition(
            _MARK
        )
        return before, after
