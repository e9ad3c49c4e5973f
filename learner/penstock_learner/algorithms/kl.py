"""KL penalties towards the reference policy, and the controllers of their coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from penstock.config.algorithms import KLConfig, PenaltyName
from penstock_learner.algorithms.aggregation import apply_mask
from penstock_learner.algorithms.registry import Registry

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0
_MAX_CORRECTION = 0.2

PenaltyFunction = Callable[[Tensor], Tensor]
"""Computes the penalty of each token from `lp - ref`."""


def k1(difference: Tensor) -> Tensor:
    """`lp - ref`: unbiased, of either sign. As a loss its expected gradient is 0, so use it in the reward."""
    return difference


def absolute(difference: Tensor) -> Tensor:
    """`|lp - ref|`."""
    return difference.abs()


def k2(difference: Tensor) -> Tensor:
    """`(lp - ref)^2 / 2`."""
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """`exp(d) - d - 1` with `d = clamp(ref - lp, -20, 20)`, clamped to [-10, 10]. Never negative."""
    d = (-difference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return (d.exp() - d - 1).clamp(-_MAX_K3, _MAX_K3)


PENALTIES: Registry[PenaltyFunction] = Registry("KL penalty", {"k1": k1, "abs": absolute, "k2": k2, "k3": k3})


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, name: PenaltyName) -> Tensor:
    """[T] the penalty of each token, 0 where masked out. The gradient flows through `log_probs`. `ref_log_probs` come
    from a forward pass of the reference policy, never from the rollout engine."""
    difference = apply_mask(log_probs - ref_log_probs.detach(), mask)
    return apply_mask(PENALTIES.get(name)(difference), mask)


def penalize_rewards(token_rewards: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """`r_t - coefficient * kl_t` without gradient, for `placement: reward`. Applied before advantages."""
    return token_rewards - coefficient * kl.detach()


@dataclass(frozen=True)
class KLController:
    """The KL coefficient, which a checkpoint stores, and how it changes. An adaptive one follows `coefficient *= 1 +
    clip(KL / target - 1, -0.2, 0.2) * num_sequences / horizon`."""

    config: KLConfig
    coefficient: float

    def updated(self, measured_kl: float, num_sequences: int) -> KLController:
        """The controller after a step over `num_sequences` sequences whose mean KL per token was `measured_kl`. A KL
        that is not finite is ignored: its step was skipped."""
        if self.config.controller == "fixed" or not math.isfinite(measured_kl):
            return self
        error = min(max(measured_kl / self.config.target - 1, -_MAX_CORRECTION), _MAX_CORRECTION)
        return replace(self, coefficient=self.coefficient * (1 + error * num_sequences / self.config.horizon))


def make_kl_controller(config: KLConfig, coefficient: float | None = None) -> KLController:
    """The controller of a run. `coefficient` is the value from which an adaptive one resumes."""
    resumes = config.controller != "fixed" and coefficient is not None
    return KLController(config, coefficient if resumes and coefficient is not None else config.coefficient)
