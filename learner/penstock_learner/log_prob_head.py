"""Log-probs and entropies straight from hidden states: the [tokens, vocabulary] logits are never whole in memory.

They are made, used and dropped a chunk of tokens at a time. Forward keeps one number a token (the log of the softmax's
denominator); backward makes a chunk's logits again, and from them their gradient, which adds to those of the hidden
states and, in float32, of the head's weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Statistics = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def log_probs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    chunk_tokens: int,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob [T] of each target, with gradient to `hidden` [T, H] and `weight` [V, H], and entropy [T], without.

    Both are float32, of the logits divided by `temperatures` [T]. `compiled` fuses what is between the products."""
    log_probs, entropy = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, temperatures, chunk_tokens, compiled
    )
    return log_probs, entropy


def _statistics(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob of the target, entropy, and the log of the denominator; [C] each."""
    scaled = logits.float() / temperatures.unsqueeze(1)
    highest = scaled.amax(dim=1)
    exponentials = (scaled - highest.unsqueeze(1)).exp()
    denominator = exponentials.sum(dim=1)
    log_denominator = highest + denominator.log()
    # Entropy is log Z - E[logit]; taken relative to the highest logit, so that large logits cost no digits.
    mean = (exponentials * (scaled - highest.unsqueeze(1))).sum(dim=1) / denominator
    chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1).float() / temperatures
    return chosen - log_denominator, denominator.log() - mean, log_denominator


def _logit_gradient(
    logits: Tensor, targets: Tensor, temperatures: Tensor, log_denominator: Tensor, gradient: Tensor
) -> Tensor:
    """[C, V], in the logits' type: gradient · (1[target] - probability) / temperature."""
    probabilities = (logits.float() / temperatures.unsqueeze(1) - log_denominator.unsqueeze(1)).exp()
    is_target = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0) == targets.unsqueeze(1)
    return ((is_target.float() - probabilities) * (gradient / temperatures).unsqueeze(1)).to(logits.dtype)


_compiled: dict[str, Any] = {}
"""The fused forms, made when first asked for."""


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
        chunk_tokens: int,
        compiled: bool,
    ) -> tuple[Tensor, Tensor]:
        statistics = _functions(compiled)[0]
        parts = [
            statistics(h @ weight.t(), target, temperature)
            for h, target, temperature in zip(
                *(tensor.split(chunk_tokens) for tensor in (hidden, targets, temperatures)), strict=True
            )
        ]
        log_probs, entropy, log_denominator = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_denominator)
        ctx.chunk_tokens, ctx.compiled = chunk_tokens, compiled
        ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, log_denominator = ctx.saved_tensors
        logit_gradient = _functions(ctx.compiled)[1]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        for first in range(0, len(hidden), ctx.chunk_tokens):
            part = slice(first, first + ctx.chunk_tokens)
            h = hidden[part]
            grad_logits = logit_gradient(
                h @ weight.t(), targets[part], temperatures[part], log_denominator[part], gradient[part]
            )
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), h)
            del grad_logits
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a · b, whatever the type of a and b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)
