"""Text of token ids, if the gateway can read the model's tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.v1 import groups_pb2

logger = logging.getLogger(__name__)


class TokenText:
    """Decodes tokens for people to read. A gateway needs no model folder: without a tokenizer, texts stay empty."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_path: Path) -> TokenText:
        path = model_path / "tokenizer.json"
        if not path.is_file():
            logger.info("%s does not exist: trajectories are sent without text", path)
            return cls(None)
        try:
            from tokenizers import Tokenizer

            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises a bare Exception for a file that it does not understand
            logger.warning("%s cannot be used (%s): trajectories are sent without text", path, error)
            return cls(None)

    def fill(self, group: groups_pb2.Group, token_ids: Sequence[Sequence[int]]) -> None:
        """Add the text and the tokens to each trajectory. `token_ids` has the ids of each."""
        if self._tokenizer is None:
            return
        for trajectory, ids in zip(group.trajectories, token_ids, strict=True):
            trajectory.text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
            trajectory.tokens[:] = self.tokens(ids)

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, or its id if there is no tokenizer."""
        if self._tokenizer is None:
            return [f"token_id:{token}" for token in token_ids]
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
