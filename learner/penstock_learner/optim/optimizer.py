"""One optimizer step, the same for every model that is trained: learning rate, clipping, skipping bad gradients."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.config.learner import LearnerConfig
from penstock_learner.optim.adamw import LARGE, ScaledAdamW, local_shard
from penstock_learner.optim.step import OptimizerStep


def make_optimizer(model: nn.Module, learner: LearnerConfig, lr: float) -> ScaledAdamW:
    """AdamW over the parameters that require a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    compiles = trained[0].is_cuda and learner.compile
    return ScaledAdamW(
        trained,
        large=LARGE if compiles else math.inf,
        compiled=compiles,
        lr=lr,
        betas=learner.betas,
        eps=learner.adam_eps,
        weight_decay=learner.weight_decay,
    )


def learning_rate(learner: LearnerConfig, lr: float, num_done: int) -> float:
    """The learning rate after `num_done` steps: a linear warm-up from 0 to `lr`, then the schedule.

    The first step of a warm-up has the rate 0, as with verl's and Hugging Face's schedulers."""
    step = max(num_done, 0)
    if step < learner.warmup_steps:
        return lr * step / learner.warmup_steps
    if learner.lr_schedule == "constant":
        return lr
    progress = min(1.0, (step - learner.warmup_steps) / (learner.num_steps - learner.warmup_steps))
    share = 1 - progress if learner.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return lr * (learner.min_lr_share + (1 - learner.min_lr_share) * share)


def apply_gradients(
    model: nn.Module,
    optimizer: ScaledAdamW,
    learner: LearnerConfig,
    num_done: int,
    *,
    lr: float,
    losses: Tensor,
    hold: bool = False,
) -> OptimizerStep:
    """Clip the gradients and take a step, with the learning rate after `num_done` steps of this model. Collective.

    The step is skipped if the gradient or one of the `losses` is not finite on any rank. `hold` leaves the weights and
    the optimizer as they are. Every trained parameter is sharded over all ranks, so the norm is computed over all
    shards together."""
    lr = learning_rate(learner, lr, num_done)
    for group in optimizer.param_groups:
        group["lr"] = lr
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    squares = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()
    sums = torch.stack([squares, (~losses.isfinite()).sum().to(squares)])
    dist.all_reduce(sums)
    if not hold:
        optimizer.step_scaled(_clipping_scale(sums, learner.max_grad_norm))
    squared_norm, num_bad = sums.tolist()  # the host waits for the device here, after the step is enqueued
    grad_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    return OptimizerStep(grad_norm, lr, skipped=num_bad > 0 or not math.isfinite(grad_norm))


def _clipping_scale(sums: Tensor, max_norm: float) -> Tensor:
    """The factor that clips the gradients, or NaN if the step must be skipped."""
    squared_norm, num_bad = sums.unbind()
    scale = (max_norm / squared_norm.sqrt()).clamp(max=1.0)
    return scale.where(squared_norm.isfinite() & (num_bad == 0), math.nan)
