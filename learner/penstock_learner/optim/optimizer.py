"""One optimizer step, the same for every model that is trained: learning rate, clipping, skipping bad gradients.

The scale of the gradients is a tensor on their device, so the host never waits for the gradient norm: it enqueues the
step while a GPU still runs the backward pass. Most weights go to torch's fused kernel, all at once. A large weight on a
GPU can get its own compiled kernel that reads and writes memory once, which is a third faster than torch's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.config.learner import LearnerConfig

# ── AdamW ──

LARGE = 2**25
"""Smallest number of elements for which a separate kernel pays off. For fewer, starting it costs more than it saves."""


class ScaledAdamW(torch.optim.AdamW):
    """torch's AdamW with a step that scales the gradients. Its state is torch's, so a checkpoint loads into either.
    Weights of at least `large` elements, by default none, get a separate kernel, which `compiled` fuses."""

    def __init__(
        self, parameters: Sequence[Tensor], *, large: float = math.inf, compiled: bool = False, **options: Any
    ) -> None:
        super().__init__(parameters, **options)
        self.large = large
        self.compiled = compiled

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the loss is never evaluated again
        """One step with the gradients as they are, for callers that expect a torch optimizer."""
        parameter = self.param_groups[0]["params"][0]
        self.step_scaled(torch.ones((), device=parameter.device))

    @torch.no_grad()
    def step_scaled(self, scale: Tensor) -> None:
        """One step with the gradients times `scale`, a 0-d tensor. If it is not finite, neither weights nor state
        change."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            weights = [self._weight(parameter) for parameter in trained]
            steps = [weight.step for weight in weights]
            scale = scale.to(steps[0].device)
            torch._foreach_add_(steps, scale.isfinite().to(steps[0].dtype))
            self._step_weights(weights, scale, group)

    def _step_weights(self, weights: list[_Weight], scale: Tensor, group: dict[str, Any]) -> None:
        large = [weight for weight in weights if weight.value.numel() >= self.large]
        if large:
            factors = _factors(scale, weights[0].step, group)
            update = _update(tuple(group["betas"]), group["eps"], self.compiled)
            for weight in large:
                update(*(tensor.view(-1) for tensor in weight[:4]), factors)
        _step_together([weight for weight in weights if weight.value.numel() < self.large], scale, group)

    def _weight(self, parameter: Tensor) -> _Weight:
        state, gradient = self._state_of(parameter), parameter.grad
        assert gradient is not None
        mean, square = local_shard(state["exp_avg"]), local_shard(state["exp_avg_sq"])
        return _Weight(local_shard(parameter), local_shard(gradient), mean, square, state["step"])

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=device_of(parameter))
            state["exp_avg"] = self._zeros(parameter)
            state["exp_avg_sq"] = self._zeros(parameter)
        return state

    def _zeros(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter)


BUCKET = 2**25
"""Most weights whose state is copied to the GPU at once if it is kept on the host: 128 MiB in float32 for each part."""


class HostAdamW(ScaledAdamW):
    """The same with parts of its state in host memory: weights and gradients if FSDP2 keeps them there, and with
    `moments_on_host` the moments, pinned for ranks with a GPU. A step copies them to the GPU, bucket by bucket, updates
    them there, and copies weights and moments back."""

    def __init__(self, parameters: Sequence[Tensor], *, moments_on_host: bool = True, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.moments_on_host = moments_on_host

    def _step_weights(self, weights: list[_Weight], scale: Tensor, group: dict[str, Any]) -> None:
        for bucket in _buckets(weights):
            moved = [weight.on(scale.device) for weight in bucket]
            _step_together(moved, scale, group)
            for there, own in zip(moved, bucket, strict=True):
                for new, old in ((there.value, own.value), (there.mean, own.mean), (there.square, own.square)):
                    old.copy_(new, non_blocking=True)
        if scale.is_cuda:
            torch.cuda.current_stream().synchronize()  # the host may read weights and moments from here on

    def _zeros(self, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        shard, device = local_shard(parameter), device_of(parameter)
        is_pinned = self.moments_on_host and device.type == "cuda"
        home = None if self.moments_on_host else device
        zeros = torch.zeros(shard.shape, dtype=shard.dtype, device=home, pin_memory=is_pinned)
        # `DTensor.from_local` would move it to the device of the mesh.
        return DTensor(zeros, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else zeros

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that was kept anywhere. torch would move the moments to the weights' device."""
        kept, loaded = self.state, defaultdict[Tensor, Any](dict)
        super().load_state_dict({**state_dict, "state": {}})
        self.state = kept
        names, own = (
            chain.from_iterable(group["params"] for group in groups)
            for groups in (state_dict["param_groups"], self.param_groups)
        )
        for name, parameter in zip(names, own, strict=True):
            if saved := state_dict["state"].get(name):
                loaded[parameter] = self._state_of(parameter)
                for key, value in loaded[parameter].items():
                    local_shard(value).copy_(local_shard(saved[key]))
        self.state = loaded


class _Weight(NamedTuple):
    """This rank's shard of a weight, with its gradient and state."""

    value: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor

    def on(self, device: torch.device) -> _Weight:
        return _Weight(*(tensor.to(device, non_blocking=True) for tensor in self))


def _buckets(weights: Sequence[_Weight]) -> Iterator[list[_Weight]]:
    """Slices of the weights, in buckets of at most `BUCKET` elements."""
    bucket: list[_Weight] = []
    for weight in weights:
        flat = [tensor.view(-1) for tensor in weight[:4]]
        for value, gradient, mean, square in zip(*(tensor.split(BUCKET) for tensor in flat), strict=True):
            if bucket and sum(part.value.numel() for part in bucket) + value.numel() > BUCKET:
                yield bucket
                bucket = []
            bucket.append(_Weight(value, gradient, mean, square, weight.step))
    if bucket:
        yield bucket


def device_of(parameter: Tensor) -> torch.device:
    """The device on which a parameter is used, also where its shard is kept in host memory."""
    from torch.distributed.tensor import DTensor

    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard. Working on shards avoids a dispatch through the device mesh for every parameter."""
    from torch.distributed.tensor import DTensor  # takes a second, which a controller's start does without

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step_together(weights: list[_Weight], scale: Tensor, group: dict[str, Any]) -> None:
    """Call torch's fused kernel. It divides the gradients by `grad_scale`, and does nothing if `found_inf` is 1."""
    if not weights:
        return
    beta1, beta2 = group["betas"]
    values, gradients, means, squares, steps = (list(column) for column in zip(*weights, strict=True))
    torch._fused_adamw_(
        values,
        gradients,
        means,
        squares,
        [],
        steps,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=1 / scale,
        found_inf=1 - scale.isfinite().float(),
    )


def _factors(scale: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
    """[4] the scale of the gradients, the share of the weight that decay leaves, the learning rate over the bias
    correction of the first moment, and the inverse root of that of the second moment."""
    (beta1, beta2), lr, count = group["betas"], group["lr"], step.double()
    kept = torch.full_like(count, 1 - lr * group["weight_decay"])
    return torch.stack([scale.double(), kept, lr / (1 - beta1**count), (1 - beta2**count).rsqrt()]).float()


@cache
def _update(betas: tuple[float, float], eps: float, compiled: bool) -> Callable[..., None]:
    """The kernel of a large weight. Its constants are compiled in: as arguments they cost a third of its speed."""
    beta1, beta2 = betas

    def update(weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, factors: Tensor) -> None:
        scale, kept, rate, unbias = factors.unbind()
        scaled = gradient.float() * scale
        new_mean = mean.float() * beta1 + scaled * (1 - beta1)
        new_square = square.float() * beta2 + scaled * scaled * (1 - beta2)
        new_weight = weight.float() * kept - rate * new_mean / (new_square.sqrt() * unbias + eps)
        is_taken = scale.isfinite()
        for old, new in ((weight, new_weight), (mean, new_mean), (square, new_square)):
            old.copy_(torch.where(is_taken, new, old.float()))

    return torch.compile(update, dynamic=True) if compiled else update


# ── a step ──


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of a step. It is the same on every rank."""

    grad_norm: float
    """Norm of the whole model's gradient, before clipping."""
    lr: float
    skipped: bool
    """True when the loss or the gradient was not finite. The weights are then unchanged."""


def make_optimizer(model: nn.Module, learner: LearnerConfig, lr: float) -> ScaledAdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options = {"lr": lr, "betas": learner.betas, "eps": learner.adam_eps, "weight_decay": learner.weight_decay}
    if learner.offload != "none":
        return HostAdamW(trained, moments_on_host=learner.offload != "weights", **options)
    compiles = trained[0].is_cuda and learner.compile
    return ScaledAdamW(trained, large=LARGE if compiles else math.inf, compiled=compiles, **options)


def learning_rate(learner: LearnerConfig, lr: float, num_done: int) -> float:
    """The learning rate after `num_done` steps: a linear warm-up from 0 to `lr`, then the schedule. The first step of a
    warm-up has the rate 0, as with verl's and Hugging Face's schedulers."""
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
    """Clip the gradients and take a step, with the learning rate after `num_done` steps of this model. Collective. The
    step is skipped if the gradient or one of the `losses` is not finite on any rank. `hold` leaves the weights and the
    optimizer as they are. The norm is computed over all ranks' shards together."""
    lr = learning_rate(learner, lr, num_done)
    for group in optimizer.param_groups:
        group["lr"] = lr
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norms = torch._foreach_norm([local_shard(gradient) for gradient in gradients], 2, dtype=torch.float32)
    squares = torch.stack(norms).square().sum() / _num_copies(gradients[0])
    sums = torch.stack([squares, (~losses.isfinite()).sum().to(squares)])
    dist.all_reduce(sums)
    if not hold:
        optimizer.step_scaled(_clipping_scale(sums, learner.max_grad_norm))
    squared_norm, num_bad = sums.tolist()  # the host waits for the device here, after the step is enqueued
    grad_norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    return OptimizerStep(grad_norm, lr, skipped=num_bad > 0 or not math.isfinite(grad_norm))


def _num_copies(tensor: Tensor) -> int:
    """The number of ranks that have the same shard of a tensor. It is the same for all weights of a model."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def _clipping_scale(sums: Tensor, max_norm: float) -> Tensor:
    """The factor that clips the gradients, or NaN if the step must be skipped."""
    squared_norm, num_bad = sums.unbind()
    scale = (max_norm / squared_norm.sqrt()).clamp(max=1.0)
    return scale.where(squared_norm.isfinite() & (num_bad == 0), math.nan)
