"""Layers that carry a state from token to token, computed on packed sequences so that no state leaves a sequence.

| layer                   | what carries state               | how it stops at a sequence's first token              |
|-------------------------|----------------------------------|-------------------------------------------------------|
| gated delta net         | convolution, [keys, values]      | kernel: `cu_seqlens`; plain: each has its own chunks  |
| Mamba-2                 | convolution, [keys, values]      | the same                                              |
| short convolution       | convolution                      | earlier positions than 0 count as zero                |
| RG-LRU (RecurrentGemma) | convolution, a number per channel| the first token's decay is zero                       |

The kernels are those of flash-linear-attention, where it is installed and the tensors are on a GPU in half precision.
The plain forms compute in float32. Hugging Face's own forward of these layers is used where no packing is given.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock_learner.model.attention.packed_layout import Packing, to_device

logger = logging.getLogger(__name__)
_CHUNK = 64
"""Tokens that the plain forms compute at once."""


def pack_recurrent_layers(lm: nn.Module) -> None:
    """Make every recurrent layer of a model compute packed sequences when it is given their packing."""
    for module in lm.modules():
        kind: Any = type(module)
        form = _FORMS.get(kind.__name__)
        if form is not None:
            module.__class__ = _packed(kind)
        if form in (_gated_delta_net, _mamba2) and torch.cuda.is_available() and missing_kernels():
            _warn_of_plain_form()


@cache
def _warn_of_plain_form() -> None:
    logger.warning("recurrent layers run in plain PyTorch, which is slow on a GPU: install %s", missing_kernels())


@cache
def _packed(kind: Any) -> type[nn.Module]:
    """The class of a layer with another forward. Layers of a class share their compiled code; a function that was put
    into each layer would be compiled for each."""
    plain, form = kind.forward, _FORMS[kind.__name__]

    def forward(self: Any, *args: Any, **others: Any) -> Any:
        packing = others.get("packing", others.get("seq_idx"))
        if packing is None:
            return plain(self, *args, **others)
        states = args[0] if args else others["hidden_states"]
        return form(self, states[0], packing)

    return type(kind.__name__, (kind,), {"forward": forward})


# ── the layers ──


def _gated_delta_net(module: Any, states: Tensor, packing: Packing) -> Tensor:
    if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next
        qkvz, ba = module.in_proj_qkvz(states), module.in_proj_ba(states)
        *parts, gate, b, a = (part[0] for part in module.fix_query_key_value_ordering(qkvz[None], ba[None]))
        mixed = torch.cat([part.flatten(1) for part in parts], dim=1)
    elif hasattr(module, "in_proj_qkv"):  # Qwen3.5
        mixed, gate = module.in_proj_qkv(states), module.in_proj_z(states)
        b, a = module.in_proj_b(states), module.in_proj_a(states)
    else:  # OLMo
        mixed = torch.cat([module.q_proj(states), module.k_proj(states), module.v_proj(states)], dim=1)
        gate, b, a = module.g_proj(states), module.b_proj(states), module.a_proj(states)
    mixed = _convolve(module.conv1d, mixed, packing, module.activation)
    q, k, v = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=1)
    q, k = (part.unflatten(1, (-1, module.head_k_dim)) for part in (q, k))
    v = v.unflatten(1, (-1, module.head_v_dim))
    strength = b.sigmoid() * (2.0 if getattr(module, "allow_neg_eigval", False) else 1.0)
    log_decay = -module.A_log.float().exp() * functional.softplus(a.float() + module.dt_bias)
    mixed = delta_rule(q, k, v, log_decay, strength, packing)
    norm, project = (module.norm, module.out_proj) if hasattr(module, "out_proj") else (module.o_norm, module.o_proj)
    normed = norm(mixed.flatten(0, 1), gate.reshape(-1, module.head_v_dim))
    output: Tensor = project(normed.view(1, len(states), -1))
    return output


def _mamba2(module: Any, states: Tensor, packing: Packing) -> Tensor:
    scaled = getattr(module, "mup_vector", None)  # Falcon-H1
    if scaled is not None:
        states = states * module.ssm_in_multiplier
    projected = module.in_proj(states)
    if scaled is not None:
        projected = projected * scaled[0]
    num_state = module.n_groups * module.ssm_state_size
    width = module.intermediate_size
    gate, mixed, steps = projected.split([width, width + 2 * num_state, module.num_heads], dim=1)
    mixed = _convolve(module.conv1d, mixed, packing, module.activation)
    x, k, q = mixed.split([width, num_state, num_state], dim=1)
    x = x.unflatten(1, (module.num_heads, -1))
    k, q = (part.unflatten(1, (module.n_groups, -1)) for part in (k, q))
    steps = functional.softplus(steps + module.dt_bias.to(steps.dtype)).clamp(*module.time_step_limit).float()
    log_decay = -module.A_log.float().exp() * steps
    scanned = state_space(q, k, x * steps.unsqueeze(2), log_decay, packing) + module.D.unsqueeze(1) * x.float()
    scanned = scanned.reshape(1, len(states), -1)
    if getattr(module, "mamba_rms_norm", True):
        scanned = module.norm(scanned, gate.unsqueeze(0))
    else:
        scanned = scanned * functional.silu(gate.unsqueeze(0))
    output: Tensor = module.out_proj(scanned.to(states.dtype))
    return output


def _short_convolution(module: Any, states: Tensor, packing: Packing) -> Tensor:
    b, c, x = module.in_proj(states).chunk(3, dim=1)
    output: Tensor = module.out_proj(c * _convolve(module.conv, b * x, packing))
    return output.unsqueeze(0)


def _recurrent_gemma(module: Any, states: Tensor, packing: Packing) -> tuple[Tensor, None]:
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

    unit, is_first = module.rg_lru, (packing.columns == 0).unsqueeze(1)
    x = _convolve(module.conv_1d, module.linear_x(states), packing)
    heads = x.unflatten(1, (unit.num_attention_heads, unit.block_width)).transpose(0, 1)

    def gate(weight: Tensor, bias: Tensor) -> Tensor:
        return torch.baddbmm(bias.unsqueeze(1), heads, weight).transpose(0, 1).flatten(1).sigmoid()

    log_decay = -8.0 * gate(unit.recurrent_gate_weight, unit.recurrent_gate_bias)
    log_decay = log_decay * functional.softplus(unit.recurrent_param)
    scale = SqrtBoundDerivative.apply(1 - torch.exp(2 * log_decay)).masked_fill(is_first, 1.0)
    x = x * gate(unit.input_gate_weight, unit.input_gate_bias) * scale.to(x.dtype)
    x = _scan(x, log_decay.exp().masked_fill(is_first, 0.0), packing.longest)
    output = module.linear_out(x * module.act_fn(module.linear_y(states)))
    return output.unsqueeze(0), None


_FORMS: dict[str, Callable[[Any, Tensor, Packing], Any]] = {
    "Qwen3NextGatedDeltaNet": _gated_delta_net,
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
    "OlmoHybridGatedDeltaNet": _gated_delta_net,
    "NemotronHMamba2Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "RecurrentGemmaRecurrentBlock": _recurrent_gemma,
}
"""By the name of the layer's class in transformers."""


# ── convolutions, and RG-LRU's recurrence ──


def _convolve(conv: Any, states: Tensor, packing: Packing, activation: str | None = None) -> Tensor:
    """A causal convolution of each channel [N, channels], as a sum of shifted copies. A compiled layer computes it in
    one kernel."""
    weight = conv.weight.squeeze(1).float()
    position = packing.columns.unsqueeze(1)
    total = states.float() * weight[:, -1]
    for lag in range(1, weight.shape[1]):
        shifted = _shift(states, lag).masked_fill(position < lag, 0.0)
        total = total + shifted.float() * weight[:, -1 - lag]
    if conv.bias is not None:
        total = total + conv.bias.float()
    if activation is not None:
        from transformers.activations import ACT2FN

        total = ACT2FN[activation](total)
    convolved: Tensor = total.to(states.dtype)
    return convolved


def _scan(values: Tensor, decay: Tensor, longest: int) -> Tensor:
    """[N, channels] state t = decay t · state t-1 + value t. Each round doubles the tokens that are summed."""
    total, decay = values.float(), decay.float()
    step = 1
    while step < longest:
        total = total + decay * _shift(total, step)
        decay = decay * _shift(decay, step)
        step *= 2
    return total.to(values.dtype)


def _shift(states: Tensor, lag: int) -> Tensor:
    """Each token's states are those of the token `lag` before it in the row, or zero."""
    return functional.pad(states, (0, 0, lag, 0))[: len(states)]


# ── recurrences whose state is a matrix [keys, values] per head ──
#
#     state t = decay t · state t-1 + k t ⊗ v t                                      (state space)
#     state t = decay t · state t-1 + strength t · k t ⊗ (v t - decay t · k t · state t-1)       (delta rule)
#     output t = q t · state t


@torch.compiler.disable  # type: ignore[untyped-decorator]
def delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, packing: Packing) -> Tensor:
    """The gated delta rule with normalised queries and keys [N, heads of keys, dim]. Values and output are [N, heads,
    dim]; `log_decay` and `strength` are [N, heads]."""
    if _has_kernels(v):
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        q, k = (_per_head(states, v) for states in (q, k))
        rows = (states.unsqueeze(0) for states in (q, k, v, log_decay, strength.to(v.dtype)))
        output: Tensor = chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, **_bounds(packing))[0]
        return output.squeeze(0)
    q, k = (_per_head(_normalised(states.float()), v) for states in (q, k))
    return _by_chunk(q * q.shape[2] ** -0.5, k, v, log_decay, packing, strength)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def state_space(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, packing: Packing) -> Tensor:
    """Mamba-2's recurrence, in float32. The heads of `q` and `k` may be fewer than those of `v`."""
    q, k = (_per_head(states, v) for states in (q, k))
    if _has_kernels(q):
        from fla.ops.simple_gla import chunk_simple_gla

        rows = (states.unsqueeze(0) for states in (q, k, v.to(q.dtype), log_decay))
        output: Tensor = chunk_simple_gla(*rows, scale=1.0, **_bounds(packing))[0]
        return output.squeeze(0).float()
    return _by_chunk(q, k, v, log_decay, packing)


def _per_head(states: Tensor, v: Tensor) -> Tensor:
    repeats = v.shape[1] // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


def _normalised(states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().sum(dim=-1, keepdim=True) + 1e-6)


@cache
def missing_kernels() -> str:
    """What flash-linear-attention's kernels need and this process does not have, or empty."""
    try:
        import fla.ops.gated_delta_rule
        import fla.ops.simple_gla  # noqa: F401
        import triton
    except ImportError:
        return "flash-linear-attention"
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])
    # These releases compile the backward pass of gated recurrences incorrectly. flash-linear-attention refuses them.
    if torch.cuda.get_device_capability()[0] == 9 and (3, 4, 0) <= version < (3, 7, 1):
        return "triton 3.7.1 or later, for flash-linear-attention on Hopper"
    return ""


def _has_kernels(states: Tensor) -> bool:
    return states.is_cuda and states.dtype in (torch.bfloat16, torch.float16) and not missing_kernels()


def _bounds(packing: Packing) -> dict[str, Tensor]:
    """Where sequences begin, as flash-linear-attention takes it. It keeps what it derives from the same tensors."""
    if "cu_seqlens" not in packing.derived:
        on_host = torch.as_tensor(np.append(0, np.cumsum(packing.lengths)), dtype=torch.long)
        packing.derived["cu_seqlens"] = (packing.offsets.long(), on_host)
    offsets, on_host = packing.derived["cu_seqlens"]
    return {"cu_seqlens": offsets, "cu_seqlens_cpu": on_host}


class _Round(NamedTuple):
    """The r-th chunks of all sequences that have so many."""

    first: int
    end: int


@dataclass(frozen=True)
class _Chunks:
    """Sequences cut into chunks, each sequence from its first token. Longer sequences come first in every round, so the
    sequences of a round are the first ones of the round before it."""

    gather: Tensor
    """[M, C] the packed token; padding points at token 0."""
    is_token: Tensor
    """[M, C] false at padding."""
    places: Tensor
    """[N] the place of each packed token in [M · C]."""
    rounds: list[_Round]

    @classmethod
    def of(cls, packing: Packing) -> _Chunks:
        if "chunks" not in packing.derived:
            packing.derived["chunks"] = cls._make(packing.lengths, packing.gather.device)
        chunks: _Chunks = packing.derived["chunks"]
        return chunks

    @classmethod
    def _make(cls, lengths: Any, device: torch.device) -> _Chunks:
        size = min(_CHUNK, int(lengths.max()))
        starts, order = np.cumsum(lengths) - lengths, np.argsort(-lengths, kind="stable")
        rounds: list[_Round] = []
        begins, ends = [], []
        for first in range(0, int(lengths.max()), size):
            inside = order[lengths[order] > first]
            begin = rounds[-1].end if rounds else 0
            rounds.append(_Round(begin, begin + len(inside)))
            begins.append(starts[inside] + first)
            ends.append(starts[inside] + lengths[inside])
        gather = np.concatenate(begins)[:, None] + np.arange(size)
        is_token = gather < np.concatenate(ends)[:, None]
        places = np.zeros(int(lengths.sum()), dtype=np.int64)
        places[gather[is_token]] = np.flatnonzero(is_token)
        gather = np.where(is_token, gather, 0)
        return cls(to_device(gather, device), to_device(is_token, device), to_device(places, device), rounds)

    def cut(self, states: Tensor) -> Tensor:
        """[N, heads, …] to [M, heads, C, …], in float32, with zeros at padding."""
        cut = states.float()[self.gather].transpose(1, 2)
        is_token = self.is_token.unsqueeze(1)
        return cut.masked_fill(~(is_token if cut.dim() == 3 else is_token.unsqueeze(3)), 0.0)

    def join(self, blocks: Tensor) -> Tensor:
        """[M, heads, C, dim] to [N, heads, dim]."""
        return blocks.transpose(1, 2).flatten(0, 1)[self.places]


def _by_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, packing: Packing, strength: Tensor | None = None
) -> Tensor:
    """Both recurrences in plain PyTorch. All chunks are computed at once, but for what the state before each adds."""
    chunks = _Chunks.of(packing)
    q, k, values, log_decay = (chunks.cut(states) for states in (q, k, v, log_decay))
    # Differences of large sums lose digits. The delta rule's are lost in Hugging Face's forward too, which is compared.
    since_start = (log_decay if strength is not None else log_decay.double()).cumsum(dim=2)
    size = q.shape[2]
    is_earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    between = (since_start.unsqueeze(3) - since_start.unsqueeze(2)).float()
    between = between.masked_fill(~is_earlier, float("-inf")).exp()
    from_start, to_end = (
        each.float().exp().unsqueeze(3) for each in (since_start, since_start[:, :, -1:] - since_start)
    )
    scores = q @ k.transpose(2, 3) * between
    q_start, k_end, decay = q * from_start, k * to_end, from_start[:, :, -1:]
    read = None
    if strength is not None:
        # What a token writes depends on what earlier tokens of its chunk wrote: a triangular system of equations.
        strengths = chunks.cut(strength).unsqueeze(3)
        system = k @ k.transpose(2, 3) * between * strengths
        solved = torch.linalg.solve_triangular(
            system, torch.cat([values * strengths, k * from_start * strengths], dim=3), upper=False, unitriangular=True
        )
        values, read = solved.split([values.shape[3], k.shape[3]], dim=3)
    state = q.new_zeros(chunks.rounds[0].end, q.shape[1], q.shape[3], v.shape[2])
    outputs = []
    for first, end in chunks.rounds:
        state, written = state[: end - first], values[first:end]
        if read is not None:
            written = written - read[first:end] @ state
        outputs.append(q_start[first:end] @ state + scores[first:end] @ written)
        state = state * decay[first:end] + k_end[first:end].transpose(2, 3) @ written
    return chunks.join(torch.cat(outputs)).to(v.dtype)
