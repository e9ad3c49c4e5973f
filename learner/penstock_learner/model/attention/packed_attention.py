"""Attention over packed sequences, as Hugging Face's models call it.

Each token sees the earlier tokens of its own sequence, and nothing else. The linear layers run on the packed tokens
without padding, and on a token that several sequences share once. Under sequence parallelism a rank holds a slice of
the tokens: `sequence_parallel.py` exchanges it for a slice of the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock_learner.model.attention.kernels import (
    ScoreForm,
    attend,
    attend_block,
    block_mask,
    flexible,
    has_varlen,
    score_block,
    varlen,
)
from penstock_learner.model.attention.packed_layout import Packing, Paths
from penstock_learner.model.attention.prefix_kernels import prefix_attention

NAME = "penstock_packed"
_UNSUPPORTED = ("position_bias", "indices", "block_indices", "head_mask")
"""Arguments of models whose attention is not of this kind. Left out, they would give other results without a word."""

_TYPES_WITH_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention with Hugging Face's signature. `query` is [1, heads, N, dim], the output [1, N, heads, dim].

    Raises NotImplementedError if the model asks for anything that would change the result and is not done here."""
    unknown = [name for name in _UNSUPPORTED if others.get(name) is not None]
    unknown += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    if unknown or is_causal is False:
        raise NotImplementedError(
            f"{type(module).__name__} needs {', '.join(unknown) or 'attention in both directions'}"
        )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    window = _effective(_window(module, sliding_window), packing)
    if packing.parallel is not None:
        q, k, v = packing.parallel.scatter_heads(q, k, v, len(packing.rows))
        s_aux = None if s_aux is None else s_aux.chunk(packing.parallel.size)[packing.parallel.rank]
    chunk = _chunk_size(module)
    seen = packing if chunk is None else packing.in_chunks(chunk)
    output = (attend if seen.paths is None else attend_paths)(q, k, v, seen, ScoreForm(scaling, window, softcap, s_aux))
    if packing.parallel is not None:
        output = packing.parallel.gather_heads(output)
    return output.unsqueeze(0), None


def mark_layers(lm: torch.nn.Module) -> None:
    """Tell each module which kind of layer it belongs to. Call this once for a model on the packed path.

    Attention reads the kind and not the number of its layer: torch compiles a layer once for every value that it reads,
    so all layers of a kind share one program."""
    for module in lm.modules():
        types, index = _layer_types(module), getattr(module, "layer_idx", None)
        if types and index is not None:
            module.packed_layer_type = types[index]


def prepare_masks(lm: Any, packing: Packing) -> None:
    """Make the masks that layers with soft caps or sinks need on a GPU. Compiled layers only look them up."""
    config = lm.config
    has_sinks = config.model_type in _TYPES_WITH_SINKS
    if packing.gather.is_cuda and (has_sinks or getattr(config, "attn_logit_softcapping", None) is not None):
        for window in (None, getattr(config, "sliding_window", None)):
            block_mask(packing, _effective(window, packing))


def _effective(window: int | None, packing: Packing) -> int | None:
    """The window, or None if every sequence fits into it."""
    return window if window is not None and window < packing.longest else None


def _window(module: Any, sliding_window: int | None) -> int | None:
    """Tokens that a token sees. Some models give a sliding layer its window by the mask alone."""
    if sliding_window is None and _layer_type(module) == "sliding_attention":
        sliding_window = module.config.sliding_window
    return sliding_window


def _chunk_size(module: Any) -> int | None:
    """Tokens of a chunk, if the layer's attention does not cross chunks as in Llama 4."""
    if _layer_type(module) != "chunked_attention":
        return None
    size: int = module.config.attention_chunk_size
    return size


def _layer_type(module: Any) -> str | None:
    return module.packed_layer_type if _layer_types(module) else None


def _layer_types(module: Any) -> list[str] | None:
    types: list[str] | None = getattr(getattr(module, "config", None), "layer_types", None)
    return types


def register() -> None:
    """Register packed attention with Hugging Face under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed_attention)


# ── prefix trees: each stored token sees the tokens of the path to it ──

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
