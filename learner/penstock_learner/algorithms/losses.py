"""Policy losses, the value loss, KL penalties towards the reference policy, and off-policy corrections, per token and
before aggregation.

Each policy loss is a pure function (LossInputs, LossConfig) -> LossOutputs. A function of a user may return [T], the
losses alone. `ratio = exp(clamp(lp - old, -20, 20))`, `sg` stops the gradient, A is the advantage.

Importance weights and rejection are applied afterwards (`Correction.apply`). There `lr = numerator - behaviour` in
log-probs, and `ratio = exp(clamp(lr, -20, 20))`. The numerator is the proximal policy. In mode bypass the proximal
policy is the behaviour policy, and the numerator is the current one. No correction carries a gradient. The caller
chooses the proximal policy by `CorrectionConfig.mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor

from penstock.config.algorithms import CorrectionConfig, LossConfig, PenaltyName, ValueLossConfig
from penstock.errors import ConfigError
from penstock_learner.algorithms import RATIO_EDGES
from penstock_learner.algorithms.aggregation import apply_mask, count_segments, find_function, segment_mean, segment_sum

_MAX_LOG_RATIO = 20.0
_MAX_LOG_SEQUENCE_RATIO = 10.0
_MAX_K3 = 10.0
_EPSILON = 1e-8
"""Added to the probability of all other tokens, which may be 0."""
_HASH_FACTOR = 98765.4321
"""The hash of a token is the fraction of its log-prob times this."""


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
class TokenSums:
    """Sums over trained tokens without gradient. `a + b` joins those of two parts of a batch, also of two ranks. Means
    and shares are computed at the end."""

    num_tokens: Tensor

    def __add__(self, other: Self) -> Self:
        joined = {}
        for name in (each.name for each in fields(self)):
            join = torch.maximum if name.startswith("max_") else torch.add
            joined[name] = join(getattr(self, name), getattr(other, name))
        return type(self)(**joined)

    def mean_of(self, total: Tensor) -> float:
        """The mean over the trained tokens of one of the sums."""
        return float(total) / max(float(self.num_tokens), 1.0)


@dataclass(frozen=True)
class LossStatistics(TokenSums):
    """What a loss has clipped. All are 0-d."""

    num_clipped_low: Tensor
    """Tokens whose ratio was below the clip range, if that changed the loss."""
    num_clipped_high: Tensor
    """Tokens whose ratio was above the clip range (reinforce: above its cap), if that changed the loss."""
    num_dual_clipped: Tensor
    """Tokens with a negative advantage whose loss reached the dual clip."""
    sum_negative_log_ratio: Tensor
    """Sum of old - lp (reinforce: behaviour - lp), not clamped. Its mean tells how far this step has moved the
    policy."""


@dataclass(frozen=True)
class LossOutputs:
    per_token: Tensor
    """[T], exactly 0 at masked-out tokens."""
    statistics: LossStatistics


LossFunction = Callable[[LossInputs, LossConfig], LossOutputs | Tensor]


def _log_ratio(log_probs: Tensor, base_log_probs: Tensor, mask: Tensor) -> Tensor:
    return apply_mask(log_probs - base_log_probs, mask)


def _masked(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Advantages and `lp - old`, 0 where masked out."""
    return apply_mask(inputs.advantages, inputs.mask), _log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask)


def _clamped_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _outputs(
    per_token: Tensor, inputs: LossInputs, log_ratio: Tensor, *, low: Tensor | None = None, high: Tensor | None = None,
    dual: Tensor | None = None,
) -> LossOutputs:  # fmt: skip
    trained = inputs.mask.bool()

    def count(clipped: Tensor | None) -> Tensor:
        return torch.zeros_like(trained.sum()) if clipped is None else (trained & clipped).sum()

    statistics = LossStatistics(
        num_tokens=trained.sum(),
        num_clipped_low=count(low),
        num_clipped_high=count(high),
        num_dual_clipped=count(dual),
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
    advantages, log_ratio = _masked(inputs)
    loss, low, high = _clipped_surrogate(_clamped_exp(log_ratio), advantages, config)
    if config.dual_clip is None:
        return _outputs(loss, inputs, log_ratio, low=low, high=high)
    bound = -config.dual_clip * advantages
    dual = (advantages < 0) & (loss > bound)
    bounded = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return _outputs(bounded, inputs, log_ratio, low=low, high=high, dual=dual)


def gspo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """PPO's clip, without the dual clip, of the ratio `exp(min(sg[mean_t(lp - old)] + lp - sg[lp], 10))`. The ratio has
    the value of the sequence and the gradient of the token. The mean is over trained tokens."""
    advantages, log_ratio = _masked(inputs)
    log_probs = apply_mask(inputs.log_probs, inputs.mask)
    num_sequences = count_segments(inputs.sequence_ids)
    per_sequence = segment_mean(log_ratio.detach(), inputs.mask, inputs.sequence_ids, num_sequences)
    log_sequence_ratio = per_sequence[inputs.sequence_ids] + log_probs - log_probs.detach()
    ratio = log_sequence_ratio.clamp(max=_MAX_LOG_SEQUENCE_RATIO).exp()
    loss, low, high = _clipped_surrogate(ratio, advantages, config)
    return _outputs(loss, inputs, log_ratio, low=low, high=high)


def cispo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`-sg[clip(ratio, 1 - low, 1 + high)] A lp`: every token keeps a gradient, whatever its ratio."""
    advantages, log_ratio = _masked(inputs)
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


def gpg(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`-A lp`: the plain policy gradient, without a ratio."""
    advantages, log_ratio = _masked(inputs)
    return _outputs(-advantages * inputs.log_probs, inputs, log_ratio)


def geo_mean(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """GMPO: `-A_s exp(mean_t(x_t))`, the same for all tokens of a sequence. A_s is the mean of its advantages. `x` is
    `lp - old`, clipped to [-clip_low, clip_high] where that makes the loss larger: above for A > 0, below for A < 0."""
    advantages, log_ratio = _masked(inputs)
    low = (log_ratio < -config.epsilon_low) & (advantages < 0)
    high = (log_ratio > config.epsilon_high) & (advantages > 0)
    bounded = torch.where(low | high, log_ratio.clamp(-config.epsilon_low, config.epsilon_high), log_ratio)
    num_sequences = count_segments(inputs.sequence_ids)
    ratio = _clamped_exp(segment_mean(bounded, inputs.mask, inputs.sequence_ids, num_sequences))
    advantage = segment_mean(advantages, inputs.mask, inputs.sequence_ids, num_sequences)
    return _outputs((-advantage * ratio)[inputs.sequence_ids], inputs, log_ratio, low=low, high=high)


def sapo(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`-A (4 / tau) sigmoid(tau (ratio - 1))`: a soft gate in place of a clip, with a tau for each sign of A."""
    advantages, log_ratio = _masked(inputs)
    tau = torch.where(advantages > 0, config.tau_positive, config.tau_negative)
    gate = torch.sigmoid(tau * (_clamped_exp(log_ratio) - 1)) * 4 / tau
    return _outputs(-gate * advantages, inputs, log_ratio)


def clip_cov(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Clip-Cov: PPO's clip, without the dual clip, but a few tokens whose covariance is within (cov_low, cov_high) are
    omitted: `cov_share` of all, at least one, and none that PPO clips. They are chosen by a hash of the log-probs, so
    the same inputs have the same loss."""
    advantages, log_ratio = _masked(inputs)
    loss, low, high = _clipped_surrogate(_clamped_exp(log_ratio), advantages, config)
    covariance = _covariance(inputs)
    may_skip = inputs.mask.bool() & ~low & ~high & (covariance > config.cov_low) & (covariance < config.cov_high)
    log_probs = apply_mask(inputs.log_probs.detach(), inputs.mask)
    hashes = (log_probs.double() * _HASH_FACTOR).frac().abs()
    skipped = may_skip & _largest(torch.where(may_skip, hashes, -1.0), inputs.mask, config.cov_share)
    return _outputs(torch.where(skipped, 0.0, loss), inputs, log_ratio, low=low, high=high)


def kl_cov(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """KL-Cov: `-A ratio`, plus `cov_kl_coefficient |lp - old|` for the `cov_share` of tokens, at least one, with the
    largest covariance."""
    advantages, log_ratio = _masked(inputs)
    covariance = torch.where(inputs.mask.bool(), _covariance(inputs), -torch.inf)
    penalised = _largest(covariance, inputs.mask, config.cov_share)
    penalty = torch.where(penalised, config.cov_kl_coefficient * log_ratio.abs(), 0.0)
    return _outputs(-advantages * _clamped_exp(log_ratio) + penalty, inputs, log_ratio)


def dppo_tv(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """DPPO with the total variation: `-sg[min(ratio, dual_clip)] A lp`, and 0 for tokens that have moved far enough in
    the direction of A: `p - p_old > clip_high` for A > 0, `p - p_old < -clip_low` for others."""
    shift = _shift(inputs)
    return _trust_region(inputs, config, low=shift < -config.epsilon_low, high=shift > config.epsilon_high)


def dppo_kl(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """The same with the KL divergence of the token against all others: `KL(p_old, p) > clip_high` for A > 0 and
    p > p_old, `> clip_low` for other A and p < p_old."""
    lp, old = (apply_mask(each.detach(), inputs.mask) for each in (inputs.log_probs, inputs.old_log_probs))
    others = ((1 - old.exp() + _EPSILON) / (1 - lp.exp() + _EPSILON)).log()
    divergence, shift = old.exp() * (old - lp) + (1 - old.exp()) * others, _shift(inputs)
    low = (divergence > config.epsilon_low) & (shift < 0)
    return _trust_region(inputs, config, low=low, high=(divergence > config.epsilon_high) & (shift > 0))


def _shift(inputs: LossInputs) -> Tensor:
    """[T] how much the probability of each token has grown since the proximal policy."""
    return apply_mask(inputs.log_probs.detach().exp() - inputs.old_log_probs.exp(), inputs.mask)


def _trust_region(inputs: LossInputs, config: LossConfig, *, low: Tensor, high: Tensor) -> LossOutputs:
    """`-sg[min(ratio, dual_clip)] A lp`, without the tokens that are `high` for A > 0 or `low` for others."""
    advantages, log_ratio = _masked(inputs)
    ratio = _clamped_exp(log_ratio.detach())
    dual = torch.zeros_like(low) if config.dual_clip is None else ratio > config.dual_clip
    low, high = low & (advantages <= 0), high & (advantages > 0)
    loss = -ratio.clamp(max=config.dual_clip) * advantages * inputs.log_probs
    masked = low | high
    return _outputs(torch.where(masked, 0.0, loss), inputs, log_ratio, low=low, high=high, dual=dual & ~masked)


def dro(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """`-A lp + dro_beta (lp - old)^2 / 2`: a penalty in place of a clip."""
    if config.dro_beta is None:
        raise ValueError("loss dro needs dro_beta, the weight of its penalty")
    advantages, log_ratio = _masked(inputs)
    loss = -advantages * inputs.log_probs + config.dro_beta / 2 * log_ratio.square()
    return _outputs(loss, inputs, log_ratio)


def _covariance(inputs: LossInputs) -> Tensor:
    """[T] each trained token's part in the covariance of advantage and log-prob, over the micro-batch."""
    num_tokens = inputs.mask.bool().sum().clamp(min=1)
    advantages, log_probs = (
        apply_mask(tensor.detach(), inputs.mask) for tensor in (inputs.advantages, inputs.log_probs)
    )
    return (advantages - advantages.sum() / num_tokens) * (log_probs - log_probs.sum() / num_tokens)


def _largest(scores: Tensor, mask: Tensor, share: float) -> Tensor:
    """[T] whether a token has one of the largest scores. There are `share` times the trained tokens of them, but at
    least one. The number is not read back from the device."""
    place = scores.argsort(descending=True, stable=True).argsort()
    return place < (mask.bool().sum() * share).floor().clamp(min=1)


_LOSSES: tuple[LossFunction, ...] = (
    ppo, gspo, cispo, reinforce, gpg, geo_mean, sapo, clip_cov, kl_cov, dppo_tv, dppo_kl, dro
)  # fmt: skip
LOSSES = {each.__name__: each for each in _LOSSES}


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Apply the loss that `config.name` names. Raises ConfigError if a user's function returns something else."""
    outputs = find_function("loss", config.name, LOSSES)(inputs, config)
    if isinstance(outputs, Tensor) and outputs.shape == inputs.mask.shape:
        log_ratio = _log_ratio(inputs.log_probs, inputs.old_log_probs, inputs.mask)
        outputs = _outputs(outputs, inputs, log_ratio)
    if not isinstance(outputs, LossOutputs) or outputs.per_token.shape != inputs.mask.shape:
        raise ConfigError(f"loss {config.name} must return a tensor with one loss per token, or LossOutputs")
    return outputs


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, config: ValueLossConfig
) -> tuple[Tensor, Tensor]:
    """[T] `max((v - ret)^2, (clip(v, v_old - c, v_old + c) - ret)^2) / 2`, exactly 0 at masked-out tokens, and the
    number of tokens for which the clipped value gave the larger error, without gradient."""
    values, old_values, returns = (apply_mask(tensor, mask) for tensor in (values, old_values, returns))
    clipped = torch.clamp(values, old_values - config.clip, old_values + config.clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    num_clipped = (mask.bool() & (clipped_error > error)).sum()
    return 0.5 * torch.maximum(error, clipped_error), num_clipped


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, name: PenaltyName) -> Tensor:
    """[T] the penalty of each token, 0 where masked out. The gradient flows through `log_probs`. `ref_log_probs` come
    from a forward pass of the reference policy, never from the rollout engine.

        k1    `lp - ref`: unbiased, of either sign. As a loss its expected gradient is 0, so use it in the reward
        abs   `|lp - ref|`
        k2    `(lp - ref)^2 / 2`
        k3    `exp(d) - d - 1` with `d = clamp(ref - lp, -20, 20)`, clamped to [-10, 10]. Never negative
    """
    difference = apply_mask(log_probs - ref_log_probs.detach(), mask)
    match name:
        case "k1":
            penalty = difference
        case "abs":
            penalty = difference.abs()
        case "k2":
            penalty = 0.5 * difference.square()
        case "k3":
            d = (-difference).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            penalty = (d.exp() - d - 1).clamp(-_MAX_K3, _MAX_K3)
    return apply_mask(penalty, mask)


def penalize_rewards(token_rewards: Tensor, kl: Tensor, coefficient: float) -> Tensor:
    """`r_t - coefficient * kl_t` without gradient, for `placement: reward`. Applied before advantages."""
    return token_rewards - coefficient * kl.detach()


# ── corrections ──


@dataclass(frozen=True)
class CorrectionStatistics(TokenSums):
    """How importance weights and rejection have changed the loss."""

    num_truncated: Tensor
    """Tokens whose weight was cut to the cap."""
    num_rejected: Tensor
    """Tokens whose weight is 0: rejected, or outside the band."""
    sum_weights: Tensor
    sum_squared_weights: Tensor
    max_weight: Tensor
    max_ratio: Tensor
    """The largest token ratio, before truncation and rejection."""
    sum_ratio: Tensor
    """Sum of the token ratios, before truncation and rejection."""
    sum_kl: Tensor
    """Sum of `ratio - 1 - lr`, a per-token estimate of the KL between the behaviour policy and the numerator policy."""
    ratio_counts: Tensor
    """[len(RATIO_EDGES) + 1] number of tokens in each bucket of the ratio."""

    @property
    def effective_sample_ratio(self) -> float:
        """`(sum w)^2 / (n sum w^2)`. It is 1 on policy, and approaches 1/n when a few tokens carry all the weight."""
        squares = float(self.sum_squared_weights)
        return float(self.sum_weights) * self.mean_of(self.sum_weights) / squares if squares else 0.0


@dataclass(frozen=True)
class Correction:
    """The weight and rejection of each token, without gradient."""

    weights: Tensor
    """[T] factor of the policy loss. 0 where the token is rejected, outside the band or masked out."""
    kept: Tensor
    """[T] bool, trained tokens that were not rejected. Other loss terms (KL) are masked with it too."""
    statistics: CorrectionStatistics

    def apply(self, per_token: Tensor) -> Tensor:
        """The weighted policy loss. Aggregate it with the mask and denominators from before the rejection."""
        return apply_mask(per_token * self.weights, self.weights)


def _sequence_ratio(log_ratio: Tensor, sequence_ids: Tensor) -> Tensor:
    return _clamped_exp(segment_sum(log_ratio, sequence_ids, count_segments(sequence_ids)))[sequence_ids]


def _weights(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """[T] the weight of each token before rejection, and [T] whether it was cut to the cap. `lr` is 0 at masked-out
    tokens.

        none                  1
        token_truncation      `min(exp(clamp(lr, -20, 20)), cap)`
        sequence_truncation   `min(exp(clamp(sum_t lr, -20, 20)), cap)`, the same for all tokens of a sequence
        band                  IcePop: `ratio` within [band_low, band_high] (inclusive), else 0
    """
    uncut = torch.zeros_like(log_ratio, dtype=torch.bool)
    match config.weight_name:
        case "none":
            return torch.ones_like(log_ratio), uncut
        case "band":
            ratio = _clamped_exp(log_ratio)
            return apply_mask(ratio, (ratio >= config.band_low) & (ratio <= config.band_high)), uncut
        case "token_truncation":
            ratio = _clamped_exp(log_ratio)
        case "sequence_truncation":
            ratio = _sequence_ratio(log_ratio, sequence_ids)
    return ratio.clamp(max=config.cap), ratio > config.cap


def _kept(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] whether the ratio of a token, or the product of its sequence's ratios, is within [rejection_low,
    rejection_high]."""
    match config.rejection:
        case "none":
            return torch.ones_like(log_ratio, dtype=torch.bool)
        case "token":
            ratio = _clamped_exp(log_ratio)
        case "sequence":
            ratio = _sequence_ratio(log_ratio, sequence_ids)
    return (ratio >= config.rejection_low) & (ratio <= config.rejection_high)


def correct(
    numerator_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    config: CorrectionConfig,
) -> Correction:
    log_ratio = apply_mask((numerator_log_probs - behaviour_log_probs).detach(), mask)
    weights, truncated = _weights(log_ratio, sequence_ids, config)
    kept = mask.bool() & _kept(log_ratio, sequence_ids, config)
    weights = apply_mask(weights, kept)
    zero = log_ratio.new_zeros(1)
    ratio = apply_mask(_clamped_exp(log_ratio), mask)
    statistics = CorrectionStatistics(
        num_tokens=mask.bool().sum(),
        num_truncated=(truncated & kept).sum(),
        num_rejected=(mask.bool() & (weights == 0)).sum(),
        sum_weights=weights.sum(),
        sum_squared_weights=weights.square().sum(),
        max_weight=torch.cat((weights, zero)).max(),
        max_ratio=torch.cat((ratio, zero)).max(),
        sum_ratio=ratio.sum(),
        sum_kl=apply_mask(ratio - 1 - log_ratio, mask).sum(),
        ratio_counts=_count_ratios(ratio, mask),
    )
    return Correction(weights, kept, statistics)


def _count_ratios(ratio: Tensor, mask: Tensor) -> Tensor:
    edges = torch.tensor(RATIO_EDGES, dtype=ratio.dtype, device=ratio.device)
    counts = torch.zeros(len(RATIO_EDGES) + 1, dtype=torch.float64, device=ratio.device)
    return counts.index_add_(0, torch.bucketize(ratio, edges), mask.to(torch.float64))


def interpolate_log_probs(behaviour_log_probs: Tensor, log_probs: Tensor, share: float | Tensor) -> Tensor:
    """A proximal policy without a forward pass: `(1 - share) * behaviour + share * sg[lp]`."""
    return behaviour_log_probs + share * (log_probs.detach() - behaviour_log_probs)


@dataclass(frozen=True)
class Mismatch(TokenSums):
    """How much the log-probs of learner and engine differ for the same weights."""

    sum_abs_difference: Tensor

    @property
    def mean(self) -> float | None:
        """`mean |lp_learner - behaviour|`, or None if no token was sampled by the learner's version."""
        return float(self.sum_abs_difference) / float(self.num_tokens) if self.num_tokens > 0 else None


def measure_mismatch(
    learner_log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor, token_versions: Tensor, learner_version: int
) -> Mismatch:
    """Compare trained tokens that the engine sampled with `learner_version`, the version of `learner_log_probs`."""
    same_version = mask.bool() & (token_versions == learner_version)
    difference = apply_mask((learner_log_probs - behaviour_log_probs).detach().abs(), same_version)
    return Mismatch(same_version.sum(), difference.sum())
