"""AdamW in one pass over memory: clipping, decay, both moments and the update of a large weight are one kernel, a third
faster than torch's. Small weights, whose kernels would take longer to start than to run, go to torch's all at once.

The gradient's norm stays on the device, so that nobody waits for it: the host has the step enqueued while the device
still runs the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

LARGE = 2**25
"""Numbers of a weight that is worth a kernel of its own."""
Update = Callable[..., None]


class OnePassAdamW(torch.optim.AdamW):
    """torch's AdamW, its state included, but that a step can scale the gradients on its way, and skip itself."""

    def __init__(self, parameters: Sequence[Tensor], *, compiled: bool, **options: Any) -> None:
        super().__init__(parameters, **options)
        self.compiled = compiled

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody evaluates the loss again
        """As torch's, for those who know no other."""
        parameter = self.param_groups[0]["params"][0]
        self.step_scaled(torch.ones((), device=parameter.device))

    @torch.no_grad()
    def step_scaled(self, scale: Tensor) -> None:
        """One step with the gradients times `scale`, a number on their device. Where that is not finite, nothing
        changes: neither weights nor state."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            weights = [self._weight(parameter) for parameter in trained]
            steps = [weight.step for weight in weights]
            torch._foreach_add_(steps, scale.isfinite().to(steps[0].dtype))
            factors = _factors(scale, steps[0], group)
            update = _update(tuple(group["betas"]), group["eps"], self.compiled)
            for weight in weights:
                if weight.is_large:
                    update(*(tensor.view(-1) for tensor in weight[:4]), factors)
            _step_together([weight for weight in weights if not weight.is_large], scale, group)

    def _weight(self, parameter: Tensor) -> _Weight:
        """State is named and typed as torch's, so that a checkpoint of either is one of the other."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        gradient, mean, square = parameter.grad, state["exp_avg"], state["exp_avg_sq"]
        assert gradient is not None
        return _Weight(local(parameter), local(gradient), local(mean), local(square), state["step"])


class _Weight(NamedTuple):
    """What one step needs of it; a rank's shards."""

    value: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor

    @property
    def is_large(self) -> bool:
        return self.value.numel() >= LARGE


def local(tensor: Tensor) -> Tensor:
    """This rank's shard. Working on shards spares a dispatch through the mesh for every parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step_together(weights: list[_Weight], scale: Tensor, group: dict[str, Any]) -> None:
    """torch's own kernel; it divides the gradients by `grad_scale`, and does nothing where `found_inf` is 1."""
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
    """[4] what differs from step to step: the gradients' scale, the share of the weight that decay leaves, the learning
    rate over the first moment's bias, and the root of one over the second's."""
    (beta1, beta2), lr, count = group["betas"], group["lr"], step.double()
    kept = torch.full_like(count, 1 - lr * group["weight_decay"])
    return torch.stack([scale.double(), kept, lr / (1 - beta1**count), (1 - beta2**count).rsqrt()]).float()


@cache
def _update(betas: tuple[float, float], eps: float, compiled: bool) -> Update:
    """Numbers that never change are part of the kernel: as arguments they cost a third of its speed."""
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
