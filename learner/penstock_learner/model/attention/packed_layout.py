"""A micro-batch on the device, and the layout of its packed sequences: which token belongs where, and copies into a
padded block and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock_learner.batches.partition import PrefixTree, RankShard
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.model.attention.sequence_parallel import SequenceParallel

# ── prefix trees: the keys of each segment are the tokens of the path to it ──
#
# Queries stay as they are stored, each token once. Keys and values are copied to every path that they are on, which is
# cheap: they have few heads, and no product is computed for a copy.

_KEY_BLOCK = 512
"""Dense parts have a multiple of this many keys, so that cuDNN meets few shapes."""
_FEWEST_QUERIES = 1024
"""A dense part with fewer queries would be slower than flash attention."""
_MOST_PARTS = 32
"""Each dense part is a separate call."""


@dataclass(frozen=True)
class PathBlock:
    """Segments of the same depth as right-padded rows. Padding points at token 0."""

    queries: Tensor
    """[B, Q] stored token of each query."""
    keys: Tensor
    """[B, K] stored token of each key."""
    query_positions: Tensor
    """[B, Q] position of each query. Padding has the position of its row's first query."""
    key_positions: Tensor
    """[B, K] position of each key, beyond every query of its row at padding."""

    def visible(self, window: int | None) -> Tensor:
        """[B, 1, Q, K] whether a query sees a key."""
        distance = self.query_positions.unsqueeze(2) - self.key_positions.unsqueeze(1)
        seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return seen.unsqueeze(1)


class DensePart(NamedTuple):
    """A range of keys which all tokens of a range of queries see."""

    first_key: int
    end_key: int
    first_query: int
    end_query: int


@dataclass(frozen=True)
class FlashPaths:
    """Paths without the keys of dense parts. `packed_attention.py` joins the two."""

    keys: Tensor
    """[K] stored token of each key that is in no dense part, one path after another."""
    offsets: Tensor
    """[2, G + 1] where the queries, and the keys, of each segment begin, followed by their numbers."""
    dense: Tensor
    """[D, 4] the dense parts in host memory, with rows of zeros: another number of rows would compile a layer again."""
    equal: int
    """The length of all segments, if it is the same and the keys are their own tokens. Else 0."""

    @classmethod
    def of(cls, tree: PrefixTree, pieces: Sequence[_PathPiece], device: torch.device) -> FlashPaths | None:
        is_dense = np.zeros(tree.num_stored, dtype=bool)
        parts: list[DensePart] = []
        for begin, own_end, end in zip(tree.offsets[:-1].tolist(), tree.offsets[1:].tolist(), tree.ends.tolist(),
                                       strict=True):  # fmt: skip
            dense_end = begin + (own_end - begin) // _KEY_BLOCK * _KEY_BLOCK
            if dense_end > begin and end - own_end >= _FEWEST_QUERIES and len(parts) < _MOST_PARTS:
                # Later tokens of the segment itself see the dense keys by the causal mask.
                parts.append(DensePart(begin, dense_end, own_end, end))
                is_dense[begin:dense_end] = True
        if not parts:
            return None
        keys = []
        for piece in pieces:
            inherited = piece.keys[: len(piece.keys) - len(piece.queries)]
            keys.append(np.concatenate([inherited[~is_dense[inherited]], piece.queries]))
        sizes = [[len(piece.queries) for piece in pieces], [len(each) for each in keys]]
        dense = np.zeros((_MOST_PARTS, 4), dtype=np.int64)
        dense[: len(parts)] = parts
        is_equal = sizes[0] == sizes[1] and len(set(sizes[0])) == 1
        return cls(
            to_device(np.concatenate(keys), device),
            torch.stack([_offsets(each, device) for each in sizes]),
            torch.as_tensor(dense),
            sizes[0][0] if is_equal else 0,
        )


@dataclass(frozen=True)
class Paths:
    """The paths of a micro-batch's segments. K is the number of their tokens in all."""

    keys: Tensor
    """[K] stored token of each key, one path after another."""
    key_offsets: Tensor
    """[G + 1] where the keys of each segment begin, followed by K."""
    query_offsets: Tensor
    """[G + 1] where the queries of each segment begin, followed by M."""
    flash: FlashPaths | None
    """The paths without what all tokens after a segment see. None if there is no such part that is worth it."""
    ends: Tensor
    """[M] the first stored token after a token that does not see it any more."""
    counts: Tensor
    """[M] how many tokens of the sequences each stored token stands for."""
    blocks: tuple[PathBlock, ...]
    in_blocks: Tensor
    """[M] the place of each stored token among the queries of all blocks, row after row, padding included."""
    tree: PrefixTree

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device, chunk: int | None = None) -> Paths:
        """The paths of a tree. With `chunk`, tokens see only their own chunk of that many positions."""
        pieces = list(_pieces(tree, chunk))
        by_depth: dict[int, list[_PathPiece]] = {}
        for piece in pieces:
            by_depth.setdefault(piece.depth, []).append(piece)
        blocks: list[PathBlock] = []
        positions = tree.positions
        in_blocks, num_before = np.zeros(tree.num_stored, dtype=np.int64), 0
        for found in by_depth.values():
            queries, is_query = _rows([piece.queries for piece in found])
            keys, is_key = _rows([piece.keys for piece in found])
            in_blocks[queries[is_query]] = num_before + np.flatnonzero(is_query)
            num_before += queries.size
            query_positions = np.where(is_query, positions[queries], positions[queries[:, :1]])
            key_positions = np.where(is_key, positions[keys], positions.max() + 1)
            arrays = (queries, keys, query_positions, key_positions)
            blocks.append(PathBlock(*(to_device(array, device) for array in arrays)))
        return cls(
            flash=FlashPaths.of(tree, pieces, device) if chunk is None and _has_fast_cudnn(device) else None,
            keys=to_device(np.concatenate([piece.keys for piece in pieces]), device),
            key_offsets=_offsets([len(piece.keys) for piece in pieces], device),
            query_offsets=_offsets([len(piece.queries) for piece in pieces], device),
            ends=to_device(np.repeat(tree.ends, np.diff(tree.offsets)), device),
            counts=to_device(tree.counts.astype(np.float32), device),
            blocks=tuple(blocks),
            in_blocks=to_device(in_blocks, device),
            tree=tree,
        )


@dataclass(frozen=True)
class _PathPiece:
    """Neighbouring tokens of one segment, and all tokens that the last of them sees."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]
    depth: int


def _pieces(tree: PrefixTree, chunk: int | None) -> Iterator[_PathPiece]:
    """The segments, or parts of them that lie in one chunk, in the order of the stored tokens."""
    paths: list[NDArray[np.int64]] = []
    depths: list[int] = []
    for index, parent in enumerate(tree.parents.tolist()):
        own = np.arange(tree.offsets[index], tree.offsets[index + 1])
        path = own if parent < 0 else np.concatenate([paths[parent], own])
        paths.append(path)
        depths.append(0 if parent < 0 else depths[parent] + 1)
        begin, end = len(path) - len(own), len(path)
        if chunk is None:
            yield _PathPiece(own, path, depths[index])
            continue
        for first in range(begin // chunk * chunk, end, chunk):
            last = min(first + chunk, end)
            yield _PathPiece(path[max(first, begin) : last], path[first:last], depths[index])


def _rows(arrays: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The arrays as rows of one width, filled with zeros, and where they are not filled."""
    sizes = np.array([len(array) for array in arrays])
    is_filled = np.arange(sizes.max()) < sizes[:, None]
    rows = np.zeros(is_filled.shape, dtype=np.int64)
    rows[is_filled] = np.concatenate(arrays)
    return rows, is_filled


def _has_fast_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention is faster than flash attention: on Hopper and later GPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def _offsets(sizes: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.cumsum([0, *sizes]).astype(np.int32), device)


# ── packed sequences ──

_BLOCK_TOKENS = 512
"""On a GPU the width of a padded block is a multiple of this."""
_MAX_PADDED_RATIO = 1.1
"""A padded block counts as full if its size is at most this many times the tokens."""


@dataclass(frozen=True)
class Packing:
    """The layout of a micro-batch, for every layer: N tokens of S sequences. If sequences share what they have in
    common, N are the stored tokens and S the segments of `paths`."""

    gather: Tensor
    """[S, L] index of the packed token; padding points at token 0."""
    is_token: Tensor
    """[S, L] false at padding."""
    rows: Tensor
    """[N] sequence of each packed token."""
    columns: Tensor
    """[N] position id of each packed token: its position in its sequence, or of a stored token in its path."""
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
            is_full=num_sequences * width <= _MAX_PADDED_RATIO * num_tokens,
            is_even=num_sequences * width == num_tokens,
            lengths=lengths,
            parallel=parallel,
        )

    @classmethod
    def of_tree(cls, tree: PrefixTree, device: torch.device, parallel: SequenceParallel | None = None) -> Packing:
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


# ── the inputs of a model ──


@dataclass(frozen=True)
class ModelInputs:
    """A micro-batch on the device: N packed tokens, of which T are response tokens. A token that several sequences
    share may be stored once. N counts the stored tokens then, and T may exceed the response tokens among them."""

    token_ids: Tensor
    """[N] prompt and response of each sequence."""
    packing: Packing
    predicting: Tensor
    """[T] index of the token before each response token. Its hidden state predicts the response token."""
    targets: Tensor
    """[T] the response tokens."""
    temperatures: Tensor
    """[T] sampling temperature of each response token."""
    routed_experts: Tensor | None = None
    """[N, layers, top_k] the experts that the engine chose, -1 where it reported none."""

    @classmethod
    def of(
        cls,
        batch: SequenceBatch,
        device: torch.device,
        parallel: SequenceParallel | None = None,
        *,
        tree: PrefixTree | None = None,
    ) -> ModelInputs:
        """The inputs of a batch. With its `tree`, tokens that several sequences of a group begin with are stored once.
        The padded path does not take these."""
        index = batch.response_index
        predicting, targets = index - 1, batch.token_ids[index]
        token_ids, experts = batch.token_ids, batch.routed_experts
        if tree is not None:
            packing = Packing.of_tree(tree, device, parallel)
            token_ids, predicting = token_ids[tree.stored], tree.places[predicting]
            experts = None if experts is None else experts[tree.stored]
        else:
            packing = Packing.of(batch.lengths, device, parallel)
        return cls(
            to_device(token_ids, device),
            packing,
            to_device(predicting, device),
            to_device(targets, device),
            to_device(batch.temperatures, device),
            None if experts is None else to_device(experts, device),
        )


def tree_of(micro: SequenceBatch, part: RankShard, model: Any) -> PrefixTree | None:
    """The tree of a micro-batch of this part, if the model computes shared tokens once. The padded path cannot."""
    if not (part.shares_prefixes and model.path.is_packed):
        return None
    return part.tree or PrefixTree.of(micro)


# ── arrays between host and device ──


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device, through pinned memory, so that the host does not wait for running kernels."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def required_to_device(array: NDArray[Any] | None, device: torch.device) -> Tensor:
    """Copy a field of a batch that the controller must have filled in, because the algorithm needs it."""
    assert array is not None, "the controller did not fill in a field that the algorithm needs"
    return to_device(array, device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy small tensors to the host in one transfer: on a shared GPU each transfer waits for a turn. They travel as
    float64, which holds float32 and integers below 2**53 exactly."""
    joined = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
