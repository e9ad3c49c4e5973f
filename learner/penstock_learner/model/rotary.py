"""Rotary embeddings that depend on a sequence's length, computed for each packed sequence by itself.

Hugging Face chooses the frequencies of `dynamic` and `longrope` embeddings by the highest position of the whole row,
and `dynamic` ones remember the longest row so far. Here a sequence gets what it would get alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_BY_LENGTH = frozenset({"dynamic", "longrope"})


def embed_each_sequence(lm: nn.Module) -> None:
    """Make rotary embeddings that depend on the length treat each packed sequence by itself. Others stay as they are.

    Sequences begin at position 0."""
    for module in lm.modules():
        if _kinds(module) & _BY_LENGTH:
            module.forward = _EachSequence(module)


def depends_on_length(config: Any) -> bool:
    """Whether a model with this Hugging Face `config` has a rotary embedding that depends on a sequence's length."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    of_layers = [each for each in rope.values() if isinstance(each, dict)]
    return any(each.get("rope_type") in _BY_LENGTH for each in (rope, *of_layers))


class _EachSequence:
    """Calls a rotary embedding once for each sequence of a packed row, as if it were the first."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.whole_row = module.forward

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        starts = (position_ids[0] == 0).nonzero().flatten().tolist()
        ends = [*starts[1:], position_ids.shape[1]]
        parts = []
        for start, end in zip(starts, ends, strict=True):
            self._forget()
            parts.append(self.whole_row(x, position_ids[:, start:end], *args, **kwargs))
        cosines, sines = zip(*parts, strict=True)
        return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)

    def _forget(self) -> None:
        """Undo what a `dynamic` embedding remembers of longer rows."""
        kept = getattr(self.module, "original_inv_freq", None)
        if kept is not None and "dynamic" in _kinds(self.module):
            self.module.inv_freq = kept.to(self.module.inv_freq.device)
            self.module.max_seq_len_cached = self.module.original_max_seq_len


def _kinds(module: Any) -> set[str]:
    """The kinds of a rotary embedding. A model may have one for each type of layer."""
    kind = getattr(module, "rope_type", None) if hasattr(module, "original_inv_freq") or _is_rotary(module) else None
    return set(kind.values()) if isinstance(kind, dict) else {kind} if isinstance(kind, str) else set()


def _is_rotary(module: Any) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")
