"""Log-probs and entropies straight from hidden states: the [tokens, vocabulary] logits are never whole in memory.

The forward pass takes the whole vocabulary for a chunk of tokens, and keeps the log of each softmax's denominator. The
backward pass takes all tokens for a block of the vocabulary, with as many logits as a chunk has, and computes them and
their gradient again. One product then gives the complete gradient of the block's weight rows. Another is added, in
float32, to the gradient of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from penstock_learner.model.architectures import LogitForm
from penstock_learner.model.tensors import soft_cap

_PLAIN = LogitForm()
_ALIGNED = 128
"""The size of a vocabulary block is a multiple of this: products of odd sizes are slow."""
Statistics = Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float | None, "_OfEntropy | None"], Tensor]


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_tokens: int,
    form: LogitForm = _PLAIN,
    compiled: bool = False,
    entropy_has_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob [T] of each target and entropy [T], with gradient to `hidden` [T, H] and `weight` [V, H]; the entropy's
    only if asked for. Both are float32 and use the logits in their `form`, divided by `temperatures` [T]. `compiled`
    fuses the operations between the matrix products."""
    # c · tanh(s · x / c) / t equals c' · tanh(x / c') / t' with c' = c / s and t' = t / s.
    temperatures = temperatures / form.scale if form.scale != 1 else temperatures
    cap = None if form.softcap is None else form.softcap / form.scale
    log_probs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperatures, cap, chunk_tokens, compiled, entropy_has_gradient
    )
    return log_probs, entropy


def log_probs_of_logits(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_tokens: int,
    entropy_has_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same from a model's own logits [T, V], which it has already scaled and capped. The gradient goes to them. The
    backward pass computes the softmax of each chunk again, so that it is never whole in memory."""
    parts = [
        checkpoint(_statistics, *chunk, None, use_reentrant=False)
        for chunk in zip(*(tensor.split(chunk_tokens) for tensor in (logits, targets, temperatures)), strict=True)
    ]
    log_probs, entropy, _ = (torch.cat(part) for part in zip(*parts, strict=True))
    return log_probs, entropy if entropy_has_gradient else entropy.detach()


def _capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits.float() if cap is None else soft_cap(logits.float(), cap)


def _statistics(
    logits: Tensor, targets: Tensor, temperatures: Tensor, cap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, and log of the softmax's denominator, each [C] for a chunk of C tokens."""
    scaled = _capped(logits, cap) / temperatures.unsqueeze(1)
    highest = scaled.amax(dim=1)
    exponentials = (scaled - highest.unsqueeze(1)).exp()
    denominator = exponentials.sum(dim=1)
    log_denominator = highest + denominator.log()
    # Entropy is log Z - E[logit]. Both are taken relative to the highest logit, so large logits lose no precision.
    mean = (exponentials * (scaled - highest.unsqueeze(1))).sum(dim=1) / denominator
    chosen = _capped(logits.gather(1, targets.unsqueeze(1)).squeeze(1), cap) / temperatures
    return chosen - log_denominator, denominator.log() - mean, log_denominator


def _logit_gradient(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    log_denominator: Tensor,
    gradient: Tensor,
    cap: float | None,
    of_entropy: _OfEntropy | None = None,
) -> Tensor:
    """[T, B], in the logits' type: gradient · (1[target] - probability) / temperature · slope of the soft cap. With
    `of_entropy`, the entropy's gradient · -probability · (log-prob + entropy) is added to the factor before the
    division. `targets` are relative to the first entry of the block."""
    capped = _capped(logits, cap)
    log_probs = capped / temperatures.unsqueeze(1) - log_denominator.unsqueeze(1)
    # In place where nothing else reads them: a block of float32 logits is the largest tensor of a step.
    probabilities = log_probs.exp_() if of_entropy is None else log_probs.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == targets.unsqueeze(1)
    result = (is_target.float() - probabilities) * (gradient / temperatures).unsqueeze(1)
    if of_entropy is not None:
        entropy, entropy_gradient = of_entropy
        slope = probabilities * (log_probs + entropy.unsqueeze(1))
        result = result - slope * (entropy_gradient / temperatures).unsqueeze(1)
    if cap is not None:
        result = result * (1 - (capped / cap).square())
    return result.to(logits.dtype)


_OfEntropy = tuple[Tensor, Tensor]
"""Entropies [T] and the gradient with respect to them [T]."""
_compiled: dict[str, Any] = {}
"""The compiled functions, made on first use."""


def _functions(compiled: bool) -> tuple[Statistics, Gradient]:
    if not compiled:
        return _statistics, _logit_gradient
    if not _compiled:
        _compiled["statistics"] = torch.compile(_statistics)
        _compiled["gradient"] = torch.compile(_logit_gradient)
    return _compiled["statistics"], _compiled["gradient"]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        cap: float | None,
        chunk_tokens: int,
        compiled: bool,
        entropy_has_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        statistics = _functions(compiled)[0]
        columns = _columns(weight)
        parts = [
            statistics(h @ columns, target, temperature, cap)
            for h, target, temperature in zip(
                *(tensor.split(chunk_tokens) for tensor in (hidden, targets, temperatures)), strict=True
            )
        ]
        log_probs, entropy, log_denominator = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_denominator, entropy)
        ctx.cap, ctx.chunk_tokens, ctx.compiled = cap, chunk_tokens, compiled
        ctx.entropy_has_gradient = entropy_has_gradient
        if not entropy_has_gradient:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, log_denominator, entropy = ctx.saved_tensors
        of_entropy = (entropy, entropy_gradient) if ctx.entropy_has_gradient else None
        logit_gradient = _functions(ctx.compiled)[1]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        size = _block_size(len(hidden), len(weight), ctx.chunk_tokens)
        for first in range(0, len(weight), size):
            block = weight[first : first + size]
            grad_logits = logit_gradient(
                hidden @ _columns(block), targets - first, temperatures, log_denominator, gradient, ctx.cap, of_entropy
            )
            if grad_hidden is not None:
                _add_product(grad_hidden, grad_logits, block)
            if grad_weight is not None:
                torch.mm(grad_logits.t(), hidden, out=grad_weight[first : first + size])
            del grad_logits
        of_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return of_hidden, grad_weight, None, None, None, None, None, None


def _columns(weight: Tensor) -> Tensor:
    """The transposed weight [H, V]. For half precision on a CPU this is a row-major copy: with a transposed view torch
    on ARM calls oneDNN, which where the CPU lacks bfloat16 instructions warns and is turned off for the whole
    process."""
    is_half_on_cpu = weight.dtype in (torch.bfloat16, torch.float16) and not weight.is_cuda
    return weight.t().contiguous() if is_half_on_cpu else weight.t()


def _block_size(num_tokens: int, vocabulary: int, chunk_tokens: int) -> int:
    """Vocabulary entries per block: a block has about as many logits for all tokens as a chunk has."""
    num_blocks = max(1, -(-num_tokens // chunk_tokens))
    return -(-vocabulary // num_blocks // _ALIGNED) * _ALIGNED


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, summed in the type of `total` even if a and b have fewer bits."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)
