"""Attention over a prefix tree on a GPU, in two kinds of parts whose results are joined exactly.

A long segment that many tokens continue is attended to by all of them at once: a product without a mask over two
neighbouring ranges of the stored tokens, which cuDNN computes in half the time of flash attention. Flash attention
computes the rest: the keys of each path that are not in such a segment, with the causal mask. If these are only the
segments' own tokens and all segments are of the same length, cuDNN computes them too.

A part knows the sum of its exponentials. So the parts are joined by their weights in the whole sum. The backward pass
of a part takes the whole result and the whole sum in place of its own: then each of its scores gets the weight that it
has in the whole softmax, and the gradients of the parts add up to the exact ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

QUERY_BLOCK = 1024
"""Queries of a dense part are padded to a multiple of this. cuDNN makes a plan for every new shape."""
_NUM_INPUTS = 9


class DensePart(NamedTuple):
    """A range of keys which all tokens of a range of queries see."""

    first_key: int
    end_key: int
    first_query: int
    end_query: int


@torch.library.custom_op("penstock::prefix_attention", mutates_args={})
def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, offsets: Tensor, dense: Tensor, equal: int, longest: int,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention [M, heads, dim] of stored tokens, and the logs [heads, M] of the sums of their exponentials. `keys` [K]
    are the stored tokens that flash attention computes. Those of a segment begin at `offsets` [2, G + 1], whose first
    row is of the queries. `dense` [D, 4], in host memory, has a `DensePart` in each row, or zeros. If `equal` is not 0,
    it is the length of every segment, and `keys` are the stored tokens as they are."""
    if equal:
        attended, log_sums = _rows_forward(_rows(q, equal), _rows(k, equal), _rows(v, equal), scale)
    else:
        attended, log_sums = _flash_forward(q, k[keys], v[keys], offsets, longest, scale)
    for part in _parts(dense):
        rows, seen = slice(part.first_query, part.end_query), slice(part.first_key, part.end_key)
        other, other_sums = _dense_forward(q[rows], k[seen], v[seen], scale)
        joined, sums = _joined()(attended[rows], log_sums[:, rows], other, other_sums)
        attended[rows], log_sums[:, rows] = joined, sums
    return attended, log_sums


@torch.library.custom_op("penstock::prefix_attention_backward", mutates_args={})
def _prefix_attention_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, log_sums: Tensor, keys: Tensor,
    offsets: Tensor, dense: Tensor, equal: int, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradient = gradient.contiguous()
    if equal:
        of_q, of_k, of_v = _rows_backward(gradient, q, k, v, attended, log_sums, equal, scale)
        of_k, of_v = of_k.float(), of_v.float()
    else:
        of_q, of_keys, of_values = torch.ops.aten._flash_attention_backward(
            gradient, q, k[keys], v[keys], attended, log_sums, offsets[0], offsets[1], longest, longest, 0.0, True,
            torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device), scale=scale,
        )  # fmt: skip
        # A key has several copies. Their gradients are added up in float32.
        of_k, of_v = (
            torch.zeros(states.shape, dtype=torch.float32, device=q.device).index_add_(0, keys, of_copies.float())
            for states, of_copies in ((k, of_keys), (v, of_values))
        )
    for part in _parts(dense):
        rows, seen = slice(part.first_query, part.end_query), slice(part.first_key, part.end_key)
        q_part, k_part, v_part = _dense_backward(
            gradient[rows], q[rows], k[seen], v[seen], attended[rows], log_sums[:, rows], scale
        )
        of_q[rows] += q_part
        of_k[seen] += k_part
        of_v[seen] += v_part
    return of_q, of_k.to(k.dtype), of_v.to(v.dtype)


def _parts(dense: Tensor) -> Iterator[DensePart]:
    for row in dense.tolist():
        part = DensePart(*row)
        if part.end_key > part.first_key:
            yield part


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    attended, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, offsets[0], offsets[1], longest, longest, 0.0, True, False, scale=scale
    )
    return attended, log_sums


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    attended, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _padded_row(q), _row(k), _row(v), None, True, 0.0, False, False, scale=scale
    )
    return attended[0].transpose(0, 1)[: len(q)], log_sums.view(q.shape[1], -1)[:, : len(q)]


def _dense_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, log_sums: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The padding has no gradient, so it adds nothing to the gradients of keys and values."""
    padding = -len(q) % QUERY_BLOCK
    log_sums = functional.pad(log_sums, (0, padding)).contiguous().view(1, q.shape[1], -1, 1)
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _padded_row(gradient), _padded_row(q), _row(k), _row(v), _padded_row(attended), log_sums, nothing, nothing,
        None, None, None, len(q) + padding, len(k), 0.0, False, scale=scale,
    )  # fmt: skip
    of_q, of_k, of_v = (states[0].transpose(0, 1) for states in found)
    return of_q[: len(q)], of_k, of_v


def _rows_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of rows [G, heads, L, dim], back as [G · L, heads, dim]."""
    attended, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, True, False, scale=scale
    )
    sums = log_sums.view(*q.shape[:3]).transpose(0, 1).reshape(q.shape[1], -1)
    return attended.transpose(1, 2).reshape(-1, q.shape[1], q.shape[3]), sums


def _rows_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, log_sums: Tensor, length: int, scale: float
) -> tuple[Tensor, ...]:
    sums = log_sums.unflatten(1, (-1, length)).transpose(0, 1).contiguous().unsqueeze(3)
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)
    gradient, q, k, v, attended = (_rows(states, length) for states in (gradient, q, k, v, attended))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, attended, sums, nothing, nothing, None, None, None, length, length, 0.0, True, scale=scale
    )
    of_q, of_k, of_v = (states.transpose(1, 2).flatten(0, 1) for states in found)
    return of_q, of_k, of_v


def _rows(states: Tensor, length: int) -> Tensor:
    """[G · L, heads, dim] to [G, heads, L, dim], as a view."""
    rows: Tensor = states.unflatten(0, (-1, length))
    return rows.transpose(1, 2)


def _row(states: Tensor) -> Tensor:
    """[N, heads, dim] to [1, heads, N, dim], as a view."""
    return states.transpose(0, 1).unsqueeze(0)


def _padded_row(states: Tensor) -> Tensor:
    return _row(functional.pad(states, (0, 0, 0, 0, 0, -len(states) % QUERY_BLOCK)))


def join(one: Tensor, log_sums: Tensor, other: Tensor, other_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Join the attention [N, heads, dim] of the same queries to two sets of keys, each with the logs [heads, N] of its
    sums of exponentials."""
    sums = torch.logaddexp(log_sums, other_sums)
    shares = ((part - sums).exp().transpose(0, 1).unsqueeze(2) for part in (log_sums, other_sums))
    joined = sum(states.float() * share for states, share in zip((one, other), shares, strict=True))
    assert isinstance(joined, Tensor)
    return joined.to(one.dtype), sums


@cache
def _joined() -> Any:
    """`join`, compiled on first use: one kernel instead of ten."""
    return torch.compile(join, dynamic=True)


@prefix_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@_prefix_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, keys, offsets, dense, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, keys, offsets, dense)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.penstock.prefix_attention_backward(gradient, *ctx.saved_tensors, *ctx.numbers)
    return (*found, *[None] * (_NUM_INPUTS - 3))


prefix_attention.register_autograd(_backward, setup_context=_save)
