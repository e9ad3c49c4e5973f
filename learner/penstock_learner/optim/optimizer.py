"""One optimizer step, the same for every model that is trained: learning rate, clipping, skips of bad gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.config.learner import LearnerConfig
from penstock_learner.optim.adamw import OnePassAdamW, local


@dataclass(frozen=True)
class OptimizerStep:
    """The same on every rank."""

    grad_norm: float
    """Of the whole model, before clipping."""
    lr: float
    skipped: bool
    """True when loss or gradient was not finite and the weights are as they were."""


def make_optimizer(model: nn.Module, learner: LearnerConfig, lr: float) -> torch.optim.AdamW:
    """AdamW over what is trained; the one that is fastest where the weights are."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {
        "lr": lr,
        "betas": learner.betas,
        "eps": learner.adam_eps,
        "weight_decay": learner.weight_decay,
    }
    if trained[0].is_cuda and learner.compile:
        return OnePassAdamW(trained, compiled=True, **options)
    return torch.optim.AdamW(trained, fused=True if trained[0].is_cuda else None, **options)


def learning_rate(learner: LearnerConfig, lr: float, step: int) -> float:
    """Of step 1, 2, …: linear warm-up to `lr`, then the schedule."""
    if step < learner.warmup_steps:
        return lr * step / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return lr
    progress = min(1.0, (step - learner.warmup_steps) / (learner.num_steps - learner.warmup_steps))
    share = 1 - progress if learner.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr * (learner.min_lr_share + (1 - learner.min_lr_share) * share)


def apply_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    learner: LearnerConfig,
    step: int,
    *,
    lr: float,
    losses: Tensor,
    hold: bool = False,
) -> OptimizerStep:
    """Clip and step, unless one of this rank's `losses`, of another's, or the gradient is not finite. Collective.

    `hold` leaves the weights and the optimizer as they are. Every trained parameter is sharded over all ranks, so the
    norm is that of the shards together."""
    lr = learning_rate(learner, lr, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
    sums = torch.stack([squares, (~losses.isfinite()).sum().to(squares)])
    dist.all_reduce(sums)
    if isinstance(optimizer, OnePassAdamW) and not hold:
        optimizer.step_scaled(_clipping(sums, learner.max_grad_norm))
    squared_norm, num_bad = sums.tolist()
    grad_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    skipped = num_bad > 0 or not math.isfinite(grad_norm)
    if not isinstance(optimizer, OnePassAdamW) and not hold and not skipped:
        if grad_norm > learner.max_grad_norm:
            torch._foreach_mul_(gradients, learner.max_grad_norm / grad_norm)
        optimizer.step()
    return OptimizerStep(grad_norm, lr, skipped)


def _clipping(sums: Tensor, max_norm: float) -> Tensor:
    """What the gradients are to be multiplied with; not a number where the step is skipped."""
    squared_norm, num_bad = sums.unbind()
    scale = (max_norm / squared_norm.sqrt()).clamp(max=1.0)
    return scale.where(squared_norm.isfinite() & (num_bad == 0), math.nan)
