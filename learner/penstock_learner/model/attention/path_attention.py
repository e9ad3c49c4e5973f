"""Attention over a prefix tree: each stored token sees the tokens of the path to it. See `path_layout.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock_learner.model.attention.kernels import (
    ScoreForm,
    attend_block,
    flexible,
    has_varlen,
    score_block,
    varlen,
)
from penstock_learner.model.attention.packed_layout import Packing
from penstock_learner.model.attention.path_layout import Paths
from penstock_learner.model.attention.prefix_kernels import prefix_attention

_CUDNN_HEAD_DIM = 128


def attend_paths(q: Tensor, k: Tensor, v: Tensor, packing: Packing, form: ScoreForm) -> Tensor:
    """`attend` for sequences that share tokens, with the same result. Inputs and output are [M, heads, dim]."""
    assert packing.paths is not None
    if form.is_plain and form.window is None and packing.paths.flash is not None and _has_dense(q, v):
        flash = packing.paths.flash
        scale = q.shape[2] ** -0.5 if form.scale is None else form.scale
        attended: Tensor = prefix_attention(
            q, k, v, flash.keys, flash.offsets, flash.dense, flash.equal, packing.longest, scale
        )[0]
        return attended
    if form.is_plain and has_varlen(q, v, form):
        k, v = (_copied(states, packing.paths.keys) for states in (k, v))
        return varlen(q, k, v, packing.paths.query_offsets, packing.paths.key_offsets, packing.longest, form)
    if q.is_cuda and not form.is_plain:
        return flexible(q, k, v, packing, form)
    return _in_blocks(q, k, v, packing.paths, form)


def _has_dense(q: Tensor, v: Tensor) -> bool:
    """Whether cuDNN computes the gradients of heads of this size."""
    is_half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    return is_half and q.shape[2] == v.shape[2] <= _CUDNN_HEAD_DIM and q.shape[2] % 8 == 0


def _copied(states: Tensor, index: Tensor) -> Tensor:
    """The states at each index. Their gradient is a sum over many copies, so it is added up in float32."""
    return states.float().index_select(0, index).to(states.dtype)


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, paths: Paths, form: ScoreForm) -> Tensor:
    """Segments of the same depth at a time, as padded rows."""
    parts = []
    for block in paths.blocks:
        attended = (attend_block if form.is_plain else score_block)(
            q[block.queries], k[block.keys], v[block.keys], block.visible(form.window), form
        )
        parts.append(attended.flatten(0, 1))
    return torch.cat(parts)[paths.in_blocks]
