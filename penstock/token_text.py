"""Text of token ids, where the model's tokenizer can be read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.v1 import groups_pb2

logger = logging.getLogger(__name__)


class TokenText:
    """Decodes tokens for people to read. A process may have no model folder: without a tokenizer, ids are shown."""

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, model_path: Path) -> TokenText:
        path = model_path / "tokenizer.json"
        if not path.is_file():
            logger.info("%s does not exist: tokens are shown without text", path)
            return cls(None)
        try:
            from tokenizers import Tokenizer

            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises a bare Exception for a file that it does not understand
            logger.warning("%s cannot be used (%s): tokens are shown without text", path, error)
            return cls(None)

    @property
    def is_known(self) -> bool:
        return self._tokenizer is not None

    def fill(self, group: groups_pb2.Group, token_ids: Sequence[Sequence[int]]) -> None:
        """Add the text and the tokens to each trajectory, if there is a tokenizer. `token_ids` has the ids of each."""
        if self._tokenizer is None:
            return
        for trajectory, ids in zip(group.trajectories, token_ids, strict=True):
            trajectory.text = self.text(ids)
            trajectory.tokens[:] = self.tokens(ids)

    def text(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of all tokens together, with special tokens or without. Without a tokenizer, the ids."""
        if self._tokenizer is None:
            return " ".join(map(str, token_ids))
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token, or its id if there is no tokenizer."""
        if self._tokenizer is None:
            return [f"token_id:{token}" for token in token_ids]
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]
