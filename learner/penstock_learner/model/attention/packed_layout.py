"""The layout of packed sequences: which token belongs where, and copies into a padded block and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_learner.batches.prefix_tree import PrefixTree
from penstock_learner.model.attention.path_layout import Paths
from penstock_learner.model.attention.sequence_parallel import SequenceParallel
from penstock_learner.model.device_copies import to_device

_BLOCK_TOKENS = 512
"""On a GPU the width of a padded block is a multiple of this."""
_FULL = 1.1
"""A padded block counts as full if its size is at most this many times the tokens."""


@dataclass(frozen=True)
class Packing:
    """The layout of a micro-batch: N tokens of S sequences. It is built once and used by every layer.

    If sequences share what they have in common, N are the stored tokens and S the segments of `paths`."""

    gather: Tensor
    """[S, L] index of the packed token; padding points at token 0."""
    is_token: Tensor
    """[S, L] false at padding."""
    rows: Tensor
    """[N] sequence of each packed token."""
    columns: Tensor
    """[N] position of each packed token in its sequence, which is also its position id. That of a stored token counts
    from the beginning of its path."""
    offsets: Tensor
    """[S + 1] where each sequence begins, followed by N."""
    longest: int
    """Tokens of the longest sequence, prefix included."""
    is_full: bool
    """Whether the padded block has little padding."""
    is_even: bool
    """Whether the padded block has no padding at all. The packed tokens can then be used as they are."""
    lengths: NDArray[np.int64]
    """[S] tokens of each sequence, on the host."""
    parallel: SequenceParallel | None = None
    """Set if each rank holds a slice of the tokens."""
    paths: Paths | None = None
    """Set if tokens that several sequences share are stored once."""
    derived: dict[Any, Any] = field(default_factory=dict)
    """What attention has derived from this layout, such as masks. Every layer uses the same."""

    @classmethod
    def of(cls, lengths: NDArray[np.int64], device: torch.device, parallel: SequenceParallel | None = None) -> Packing:
        """The layout of sequences with these `lengths`, in tokens, prompt included. It is computed on the host, which
        does not wait for the device."""
        num_sequences, num_tokens, longest = len(lengths), int(lengths.sum()), int(lengths.max())
        # cuDNN makes a plan for every new shape. Rounding up keeps the number of shapes low.
        width = -(-longest // _BLOCK_TOKENS) * _BLOCK_TOKENS if device.type == "cuda" else longest
        starts = np.cumsum(lengths) - lengths
        rows = np.repeat(np.arange(num_sequences), lengths)
        columns = np.arange(num_tokens) - starts[rows]
        gather = np.zeros((num_sequences, width), dtype=np.int64)
        gather[rows, columns] = np.arange(num_tokens)
        return cls(
            gather=to_device(gather, device),
            is_token=to_device(np.arange(width) < lengths[:, None], device),
            rows=to_device(rows, device),
            columns=to_device(columns, device),
            offsets=to_device(np.append(starts, num_tokens).astype(np.int32), device),
            longest=longest,
            is_full=num_sequences * width <= _FULL * num_tokens,
            is_even=num_sequences * width == num_tokens,
            lengths=lengths,
            parallel=parallel,
        )

    @classmethod
    def of_tree(cls, tree: PrefixTree, device: torch.device, parallel: SequenceParallel | None = None) -> Packing:
        """The layout of a tree's stored tokens."""
        return replace(
            cls.of(np.diff(tree.offsets), device, parallel),
            columns=to_device(tree.positions, device),
            longest=int(tree.positions.max()) + 1,
            paths=Paths.of(tree, device),
        )

    def in_chunks(self, size: int) -> Packing:
        """The layout in which each sequence is cut into chunks of `size` tokens that do not see each other."""
        if self.longest <= size:
            return self
        if size not in self.derived and self.paths is not None:
            paths = Paths.of(self.paths.tree, self.gather.device, chunk=size)
            self.derived[size] = replace(self, paths=paths, derived={})
        elif size not in self.derived:
            lengths = [min(size, length - start) for length in self.lengths for start in range(0, length, size)]
            chunks = np.array(lengths, dtype=np.int64)
            self.derived[size] = Packing.of(chunks, self.gather.device, self.parallel)
        chunked: Packing = self.derived[size]
        return chunked


def to_block(states: Tensor, packing: Packing) -> Tensor:
    """[N, …] to [S, L, …]."""
    if packing.is_even:
        block: Tensor = states.unflatten(0, packing.gather.shape)
        return block
    apply: Callable[..., Tensor] = _ToBlock.apply
    return apply(states, packing.gather, packing.rows, packing.columns)


def from_block(block: Tensor, packing: Packing) -> Tensor:
    """[S, L, …] to [N, …]."""
    if packing.is_even:
        return block.flatten(0, 1)
    apply: Callable[..., Tensor] = _FromBlock.apply
    return apply(block, packing.gather, packing.is_token, packing.rows, packing.columns)


class _ToBlock(torch.autograd.Function):
    """Padding gets no gradient, because only queries that are padding themselves see it."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, gather: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        return states[gather]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns = ctx.saved_tensors
        return gradient[rows, columns], None, None, None


class _FromBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: Tensor, gather: Tensor, is_token: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(gather, is_token)
        return block[rows, columns]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gather, is_token = ctx.saved_tensors
        return gradient[gather] * is_token[:, :, None, None], None, None, None, None
