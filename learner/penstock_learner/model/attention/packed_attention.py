"""Attention over packed sequences, as Hugging Face's models call it, and its kernels, which all have the same result.

Each token sees the earlier tokens of its own sequence, and nothing else. The linear layers run on the packed tokens
without padding, and on a token that several sequences share once. Under sequence parallelism a rank holds a slice of
the tokens: `sequence_parallel.py` exchanges it for a slice of the heads.

| kernel   | used                       | how                                                                        |
|----------|----------------------------|----------------------------------------------------------------------------|
| varlen   | on CUDA in half precision  | `torch.nn.attention.varlen`: flash attention over the packed tokens        |
| padded   | everywhere else, and where | Tokens are copied into a right-padded [sequences, longest] block and back. |
|          | sequences are of about     | Causal attention is exact there: no token looks right, so none sees        |
|          | equal length               | padding. On Hopper it runs on cuDNN, in two thirds of the time of flash.   |
| flexible | on CUDA, if scores have a  | FlexAttention: a kernel that torch compiles for this form of the scores    |
|          | soft cap or sinks          |                                                                            |
| explicit | there without CUDA         | The scores of the padded block are computed as a tensor                    |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock_learner.model.attention.packed_layout import DensePart, Packing, Paths, from_block, to_block

NAME = "penstock_packed"
_UNSUPPORTED = ("position_bias", "indices", "block_indices", "head_mask")
"""Arguments of models whose attention is not of this kind. If they were dropped, results would differ silently."""

_TYPES_WITH_SINKS = frozenset({"gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash"})


def packed_attention(
    module: Any,
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
    """Attention with Hugging Face's signature. `query` is [1, heads, N, dim], the output [1, N, heads, dim]. Raises
    NotImplementedError if the model asks for anything that would change the result and is not done here."""
    unknown = [name for name in _UNSUPPORTED if others.get(name) is not None]
    unknown += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * (dropout > 0)
    if unknown or is_causal is False:
        raise NotImplementedError(
            f"{type(module).__name__} needs {', '.join(unknown) or 'attention in both directions'}"
        )
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    layer_type = module.packed_layer_type if _layer_types(module) else None
    if sliding_window is None and layer_type == "sliding_attention":  # the model gives the window by its mask alone
        sliding_window = module.config.sliding_window
    window = _effective(sliding_window, packing)
    if packing.parallel is not None:
        q, k, v = packing.parallel.scatter_heads(q, k, v, len(packing.rows))
        s_aux = None if s_aux is None else s_aux.chunk(packing.parallel.size)[packing.parallel.rank]
    # Attention does not cross chunks, as in Llama 4.
    seen = packing.in_chunks(module.config.attention_chunk_size) if layer_type == "chunked_attention" else packing
    output = (attend if seen.paths is None else attend_paths)(q, k, v, seen, ScoreForm(scaling, window, softcap, s_aux))
    if packing.parallel is not None:
        output = packing.parallel.gather_heads(output)
    return output.unsqueeze(0), None


def mark_layers(lm: torch.nn.Module) -> None:
    """Tell each module, once, which kind of layer it belongs to. Attention reads the kind and not the number of its
    layer: torch compiles a layer once for every value that it reads, so all layers of a kind share one program."""
    for module in lm.modules():
        types, index = _layer_types(module), getattr(module, "layer_idx", None)
        if types and index is not None:
            module.packed_layer_type = types[index]


def prepare_masks(lm: Any, packing: Packing) -> None:
    """Make the masks that layers with soft caps or sinks need on a GPU. Compiled layers only look them up."""
    config = lm.config.get_text_config()
    has_sinks = config.model_type in _TYPES_WITH_SINKS
    if packing.gather.is_cuda and (has_sinks or getattr(config, "attn_logit_softcapping", None) is not None):
        for window in (None, getattr(config, "sliding_window", None)):
            block_mask(packing, _effective(window, packing))


def _effective(window: int | None, packing: Packing) -> int | None:
    """The window, or None if every sequence fits into it."""
    return window if window is not None and window < packing.longest else None


def _layer_types(module: Any) -> list[str] | None:
    types: list[str] | None = getattr(getattr(module, "config", None), "layer_types", None)
    return types


def register() -> None:
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
        mask = block.visible(form.window)
        attended = attend_block(q[block.queries], k[block.keys], v[block.keys], mask, form)
        parts.append(attended.flatten(0, 1))
    return torch.cat(parts)[paths.in_blocks]


_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_FLASH_HEAD_DIM = 256
"""Flash attention takes heads of at most this size."""
_LARGE_HEADS_ON_HOPPER = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 2,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64,
    "bwd_num_warps": 8, "bwd_num_stages": 2,
}  # fmt: skip
"""Tiles of FlexAttention for heads of 256 in half precision on Hopper: four fifths of the time of torch's choice."""


@dataclass(frozen=True)
class ScoreForm:
    """How attention scores are made from queries and keys, and which of them a token uses."""

    scale: float | None
    """Factor of the products. None means 1 / sqrt(head size)."""
    window: int | None
    """A token sees this many tokens, itself included. None means all earlier ones."""
    softcap: float | None
    """Scores s become softcap · tanh(s / softcap)."""
    sinks: Tensor | None
    """[heads] a score that takes part in the softmax of every token, without a value."""

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend(q: Tensor, k: Tensor, v: Tensor, packing: Packing, form: ScoreForm) -> Tensor:
    """Attention of each token to the earlier tokens of its own sequence. Inputs and output are [N, heads, dim]."""
    if q.is_cuda and not form.is_plain:
        return flexible(q, k, v, packing, form)
    if has_varlen(q, v, form) and (form.window is not None or not packing.is_full):
        return varlen(q, k, v, packing.offsets, packing.offsets, packing.longest, form)
    q, k, v = (to_block(states, packing) for states in (q, k, v))
    mask = None if form.is_plain and form.window is None else _visible(q.shape[1], form.window, q.device)
    return from_block(attend_block(q, k, v, mask, form), packing)


def has_varlen(q: Tensor, v: Tensor, form: ScoreForm) -> bool:
    """Whether flash attention over packed tokens can compute a plain form."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or max(q.shape[2], v.shape[2]) > _FLASH_HEAD_DIM:
        return False
    return varlen_function() is not None and (form.window is None or "window_size" in _varlen_parameters())


@cache
def varlen_function() -> Callable[..., Any] | None:
    """Flash attention over packed tokens, or None in a torch that was built without it. Its module imports torch's
    compiler, which a rank on CPUs starts without."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


@cache
def _varlen_parameters() -> frozenset[str]:
    """The parameters of `varlen_function`. They differ between releases of torch."""
    function = varlen_function()
    return frozenset(inspect.signature(function).parameters) if function is not None else frozenset()


def varlen(
    q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor, longest: int, form: ScoreForm
) -> Tensor:
    """Flash attention over packed tokens. The last query of a sequence sees its last key."""
    function, parameters = varlen_function(), _varlen_parameters()
    assert function is not None
    options: dict[str, Any] = {"is_causal": True}
    if "window_size" in parameters:
        options = {"window_size": (-1 if form.window is None else form.window - 1, 0)}
    if "enable_gqa" in parameters:  # releases without the parameter do it by themselves
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    if form.scale is not None:
        if "scale" in parameters:
            options["scale"] = form.scale
        else:
            q = q * (form.scale * q.shape[2] ** 0.5)
    value_dim = v.shape[2]
    if value_dim != q.shape[2]:
        v = functional.pad(v, (0, q.shape[2] - value_dim))
    attended: Tensor = function(q, k, v, query_offsets, key_offsets, longest, longest, **options)
    return attended[:, :, :value_dim]


def attend_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: ScoreForm) -> Tensor:
    """Attention of padded rows [S, L, heads, dim] where the mask is true. A plain form without a mask sees all earlier
    tokens."""
    if not form.is_plain:
        assert mask is not None
        return _score_block(q, k, v, mask, form)
    q, k, v = (states.transpose(1, 2) for states in (q, k, v))
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        output: Tensor = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=form.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return output.transpose(1, 2)


def _score_block(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: ScoreForm) -> Tensor:
    """`attend_block` for any form of the scores, which are held in memory."""
    q, k, v = (states.transpose(1, 2) for states in (q, k, v))
    k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], dim=1) for states in (k, v))
    scale = q.shape[3] ** -0.5 if form.scale is None else form.scale
    scores = (q @ k.transpose(2, 3)).float() * scale
    if form.softcap is not None:
        scores = soft_cap(scores, form.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if form.sinks is not None:
        sinks = form.sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=3)
    weights = scores.softmax(dim=3)[..., : k.shape[2]].to(v.dtype)
    return (weights @ v).transpose(1, 2)


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length] whether the token of a row sees the token of a column."""
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def flexible(q: Tensor, k: Tensor, v: Tensor, packing: Packing, form: ScoreForm) -> Tensor:
    """Attention by FlexAttention, also of sequences that share tokens."""
    from torch.nn.attention.flex_attention import AuxRequest

    softcap = form.softcap

    def capped(score: Tensor, _batch: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        assert softcap is not None
        return soft_cap(score, softcap)

    attended, also = _compiled("flex_attention")(
        *(states.transpose(0, 1).unsqueeze(0) for states in (q, k, v)),
        score_mod=None if softcap is None else capped,
        block_mask=block_mask(packing, form.window),
        scale=form.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        kernel_options=_tiles(q),
        return_aux=AuxRequest(lse=True),
    )
    if form.sinks is not None:
        # A sink adds its exponential to the softmax's denominator and nothing to the sum of values.
        share = torch.sigmoid(also.lse - form.sinks.float().view(1, -1, 1))
        attended = attended * share.unsqueeze(3).to(attended.dtype)
    output: Tensor = attended[0].transpose(0, 1)
    return output


def _tiles(q: Tensor) -> dict[str, int] | None:
    """FlexAttention's tiles for these queries, or None to let torch choose them."""
    is_large = 128 < q.shape[2] <= 256 and q.element_size() == 2
    is_hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    return _LARGE_HEADS_ON_HOPPER if is_large and is_hopper else None


def block_mask(packing: Packing, window: int | None) -> Any:
    """FlexAttention's mask of the packed tokens. It is made once for all layers with the same window."""
    name = ("block mask", window)
    if name not in packing.derived:
        size, device = len(packing.rows), str(packing.rows.device)
        sees = _sees_in_sequence(packing.rows, window) if packing.paths is None else _sees_on_path(packing, window)
        packing.derived[name] = _compiled("create_block_mask")(sees, None, None, size, size, device=device)
    return packing.derived[name]


def _sees_in_sequence(rows: Tensor, window: int | None) -> Callable[..., Tensor]:
    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_visible = (rows[query] == rows[key]) & (query >= key)
        return is_visible if window is None else is_visible & (query - key < window)

    return sees


def _sees_on_path(packing: Packing, window: int | None) -> Callable[..., Tensor]:
    assert packing.paths is not None
    positions, ends = packing.columns, packing.paths.ends

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_visible = (query >= key) & (query < ends[key])
        return is_visible if window is None else is_visible & (positions[query] - positions[key] < window)

    return sees


@cache
def _compiled(name: str) -> Any:
    """A function of FlexAttention, compiled on first use. Uncompiled, it would hold all scores in memory."""
    from torch.nn.attention import flex_attention

    return torch.compile(getattr(flex_attention, name))


def soft_cap(values: Tensor, cap: float) -> Tensor:
    """`cap · tanh(values / cap)`, written as a sigmoid, which compiled kernels compute several times as fast. In
    float32 the two differ by about 1e-7 · cap."""
    return 2 * cap * torch.sigmoid(values * (2 / cap)) - cap


# ── kernels of prefix trees on a GPU: two kinds of parts whose results are joined exactly ──
#
# A long segment that many tokens continue is attended to by all of them at once: a product without a mask over two
# neighbouring ranges of the stored tokens, which cuDNN computes in half the time of flash attention. Flash attention
# computes the rest: the keys of each path that are not in such a segment, with the causal mask. If these are only the
# segments' own tokens and all segments are of the same length, cuDNN computes them too.
#
# A part knows the sum of its exponentials. So the parts are joined by their weights in the whole sum. The backward pass
# of a part takes the whole result and the whole sum in place of its own: then each of its scores gets the weight that
# it has in the whole softmax, and the gradients of the parts add up to the exact ones.

_QUERY_BLOCK = 1024
"""Queries of a dense part are padded to a multiple of this. cuDNN makes a plan for every new shape."""
_NUM_INPUTS = 9


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
        attended, log_sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k[keys], v[keys], offsets[0], offsets[1], longest, longest, 0.0, True, False, scale=scale
        )
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


def _dense_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    attended, log_sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _padded_row(q), _row(k), _row(v), None, True, 0.0, False, False, scale=scale
    )
    return attended[0].transpose(0, 1)[: len(q)], log_sums.view(q.shape[1], -1)[:, : len(q)]


def _dense_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, attended: Tensor, log_sums: Tensor, scale: float
) -> tuple[Tensor, ...]:
    """The padding has no gradient, so it adds nothing to the gradients of keys and values."""
    padding = -len(q) % _QUERY_BLOCK
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
    return _row(functional.pad(states, (0, 0, 0, 0, 0, -len(states) % _QUERY_BLOCK)))


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
