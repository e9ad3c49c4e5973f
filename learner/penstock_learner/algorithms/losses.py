"""Policy losses, per token and before aggregation.

Each is a pure function (LossInputs, LossConfig) -> LossOutputs. `ratio = exp(clamp(lp - old, -20, 20))`, `sg` stops the
gradient, A is the advantage. Importance weights and rejection are applied afterwards (`corrections.Correction.apply`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from penstock.config.algorithms import LossConfig
from penstock_learner.algorithms.registry import Registry
from penstock_learner.algorithms.segments import apply_mask, count_segments, segment_mean

_MAX_LOG_RATIO = 20.0
_MAX_LOG_SEQUENCE_RATIO = 10.0


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole sequences. All tensors are [T]."""

    log_probs: Tensor
    """Log-probs of the current policy. The gradient flows through these alone."""
    old_log_probs: Tensor
    """Log-probs of the proximal policy."""
    advantages: Tensor
    mask: Tensor
    """Nonzero where the token is trained."""
    sequence_ids: Tensor
    behaviour_log_probs: Tensor | None = None
    """Log-probs that the engine reported when it sampled. reinforce needs them."""


@dataclass(frozen=True)
class LossStatistics:
    """0-d sums without gradient. Add those of micro-batches and ranks; shares are computed at the end."""

    num_tokens: Tensor
    num_clipped_low: Tensor
    """Tokens whose ratio was below the clip range, if that changed the loss."""
    num_clipped_high: Tensor
    """Tokens whose ratio was above the clip range (reinforce: above its cap), if that changed the loss."""
    num_dual_clipped: Tensor
    """Tokens with a negative advantage whose loss reached the dual clip."""
    sum_negative_log_ratio: Tensor
    """Sum of old - lp (reinforce: behaviour - lp), not clamped."""

    def __add__(self, other: LossStatistics) -> LossStatistics:
        return LossStatistics(
            **{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)}
        )

    @property
    def clip_fraction_low(self) -> float:
        return self._per_token(self.num_clipped_low)

    @property
    def clip_fraction_high(self) -> float:
        return self._per_token(self.num_clipped_high)

    @property
    def dual_clip_fraction(self) -> float:
        return self._per_token(self.num_dual_clipped)

    @property
    def approx_kl(self) -> float:
        """Mean of old - lp over trained tokens: how far this step has moved the policy."""
        return self._per_token(self.sum_negative_log_ratio)

    def _per_token(self, total: Tensor) -> float:
        return float(total) / max(float(self.num_tokens), 1.0)


@dataclass(frozen=True)
class LossOutputs:
    per_token: Tensor
    """[T], exactly 0 at masked-out tokens."""
    statistics: LossStatistics


LossFunction = Callable[[LossInputs, LossConfig], LossOutputs]


def _log_ratio(log_probs: Tensor, base_log_probs: Tensor, mask: Tensor) -> Tensor:
    return apply_mask(log_probs - base_log_probs, mask)


def _clamped_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _outputs(
    per_token: Tensor, inputs: LossInputs, log_ratio: Tensor, *, low: Tensor, high: Tensor, dual: Tensor | None = None
) -> LossOutputs:
    trained = inputs.mask.bool()
    statistics = LossStatistics(
        num_tokens=trained.sum(),
        num_clipped_low=(trained & low).sum(),
        num_clipped_high=(trained & high).sum(),
        num_dual_clipped=(trained & dual).sum() if dual is not None else torch.zeros_like(trained.sum()),
        sum_negative_log_ratio=-log_ratio.detach().sum(),
    )
    return LossOutputs(apply_mask(per_token, trained), statistics)


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """`max(-A ratio, -A clip(ratio, 1 - low, 1 + high))`, and where the clip took effect below and above."""
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    return surrogate, (ratio < low) & (advantages < 0), (ratio > high) & (advantages > 0)


def ppo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`L = max(-A ratio, -A clip(ratio, 1 - low, 1 + high))`; for A < 0 `min(L, -dual_clip A)`."""
    advantages = apply_mask(inputs.advantages, inputs.mask)
    log_ratio = _log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask)
    loss, low, high = _clipped_surrogate(_clamped_exp(log_ratio), advantages, config)
    if config.dual_clip is None:
        return _outputs(loss, inputs, log_ratio, low=low, high=high)
    bound = -config.dual_clip * advantages
    dual = (advantages < 0) & (loss > bound)
    bounded = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return _outputs(bounded, inputs, log_ratio, low=low, high=high, dual=dual)


def gspo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """PPO's clip, without the dual clip, of the ratio `exp(min(sg[mean_t(lp - old)] + lp - sg[lp], 10))`.

    The ratio has the value of the sequence and the gradient of the token. The mean is over trained tokens.
    """
    advantages = apply_mask(inputs.advantages, inputs.mask)
    log_probs = apply_mask(inputs.log_probs, inputs.mask)
    log_ratio = _log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask)
    num_sequences = count_segments(inputs.sequence_ids)
    per_sequence = segment_mean(log_ratio.detach(), inputs.mask, inputs.sequence_ids, num_sequences)
    log_sequence_ratio = per_sequence[inputs.sequence_ids] + log_probs - log_probs.detach()
    ratio = log_sequence_ratio.clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
    loss, low, high = _clipped_surrogate(ratio, advantages, config)
    return _outputs(loss, inputs, log_ratio, low=low, high=high)


def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`-sg[clip(ratio, 1 - low, 1 + high)] A lp`: every token keeps a gradient, whatever its ratio."""
    advantages = apply_mask(inputs.advantages, inputs.mask)
    log_ratio = _log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask)
    ratio = _clamped_exp(log_ratio.detach())
    low, high = 1 - config.epsilon_low, 1 + config.epsilon_high
    loss = -ratio.clamp(low, high) * advantages * inputs.log_probs
    return _outputs(loss, inputs, log_ratio, low=ratio < low, high=ratio > high)


def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`-sg[min(exp(clamp(lp - behaviour, -20, 20)), ratio_cap)] A lp`. The proximal policy is not used."""
    if inputs.behaviour_log_probs is None:
        raise ValueError("loss reinforce needs behaviour_log_probs: the log-probs that the rollout engine reported")
    advantages = apply_mask(inputs.advantages, inputs.mask)
    log_ratio = _log_ratio(inputs.log_probs, inputs.behaviour_log_probs, inputs.mask)
    ratio = _clamped_exp(log_ratio.detach())
    loss = -ratio.clamp(max=config.ratio_cap) * advantages * inputs.log_probs
    return _outputs(loss, inputs, log_ratio, low=torch.zeros_like(ratio > 0), high=ratio > config.ratio_cap)


LOSSES: Registry[LossFunction] = Registry("loss", {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce})


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Apply the loss that `config.name` names."""
    return LOSSES.get(config.name)(inputs, config)
