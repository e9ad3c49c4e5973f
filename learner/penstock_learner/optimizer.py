"""One optimizer step, the same for every model that is trained: learning rate, clipping, skips of bad gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config.learner import LearnerConfig


@dataclass(frozen=True)
class OptimizerStep:
    """The same on every rank."""

    grad_norm: float
    """Of the whole model, before clipping."""
    lr: float
    skipped: bool
    """True when loss or gradient was not finite and the weights are as they were."""


def make_optimizer(model: nn.Module, learner: LearnerConfig, lr: float) -> torch.optim.AdamW:
    """AdamW over what is trained; one kernel a step where the weights are on a GPU."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        trained,
        lr=lr,
        betas=learner.betas,
        eps=learner.adam_eps,
        weight_decay=learner.weight_decay,
        fused=True if trained[0].is_cuda else None,
    )


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
    is_finite: bool,
    hold: bool = False,
) -> OptimizerStep:
    """Clip and step, unless this rank's loss (`is_finite`), another's, or the gradient is not finite. Collective.

    `hold` leaves the weights and the optimizer as they are. Every trained parameter is sharded over all ranks, so the
    norm is that of the shards together."""
    lr = learning_rate(learner, lr, step)
    for group in optimizer.param_groups:
        group["lr"] = lr
    gradients = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
    sums = torch.stack([squares, squares.new_tensor(0.0 if is_finite else 1.0)])
    dist.all_reduce(sums)
    squared_norm, num_bad = sums.tolist()
    grad_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    skipped = num_bad > 0 or not math.isfinite(grad_norm)
    if not skipped and not hold:
        if grad_norm > learner.max_grad_norm:
            torch._foreach_mul_(gradients, learner.max_grad_norm / grad_norm)
        optimizer.step()
    return OptimizerStep(grad_norm, lr, skipped)


def _local(gradient: Tensor) -> Tensor:
    """This rank's shard. Working on shards spares a dispatch through the mesh for every parameter."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
