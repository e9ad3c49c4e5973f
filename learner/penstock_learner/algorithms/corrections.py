"""Off-policy corrections: importance weights, rejection, and the statistics of both.

`lr = numerator - behaviour` in log-probs, and `ratio = exp(clamp(lr, -20, 20))`. The numerator is the proximal policy.
In mode bypass the proximal policy is the behaviour policy, and the numerator is the current one. Nothing here carries a
gradient. The caller chooses the proximal policy by `CorrectionConfig.mode`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from penstock.config.algorithms import CorrectionConfig
from penstock_learner.algorithms.aggregation import apply_mask, count_segments, segment_sum

_MAX_LOG_RATIO = 20.0
RATIO_EDGES = (0.1, 0.25, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0, 1.01, 1.05, 1.1, 1.25, 2.0, 4.0, 10.0)
"""Upper edges (inclusive) of the buckets in which ratios are counted."""


@dataclass(frozen=True)
class CorrectionStatistics:
    """Sums over trained tokens. Merge the parts of a batch first; means and shares are computed at the end."""

    num_tokens: Tensor
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

    def merge(self, other: CorrectionStatistics) -> CorrectionStatistics:
        """The statistics of two parts that share no token, as one."""
        names = [each.name for each in fields(self)]
        merged = {
            name: (torch.maximum if name.startswith("max_") else torch.add)(getattr(self, name), getattr(other, name))
            for name in names
        }
        return CorrectionStatistics(**merged)

    @property
    def mean_weight(self) -> float:
        return float(self.sum_weights) / self._num_tokens

    @property
    def mean_kl(self) -> float:
        return float(self.sum_kl) / self._num_tokens

    @property
    def truncated_share(self) -> float:
        return float(self.num_truncated) / self._num_tokens

    @property
    def rejected_share(self) -> float:
        return float(self.num_rejected) / self._num_tokens

    @property
    def effective_sample_ratio(self) -> float:
        """`(sum w)^2 / (n sum w^2)`. It is 1 on policy, and approaches 1/n when a few tokens carry all the weight."""
        squares = float(self.sum_squared_weights)
        return float(self.sum_weights) ** 2 / (self._num_tokens * squares) if squares else 0.0

    @property
    def _num_tokens(self) -> float:
        return max(float(self.num_tokens), 1.0)


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


WeightFunction = Callable[[Tensor, Tensor, CorrectionConfig], tuple[Tensor, Tensor]]
"""(lr[T], sequence_ids[T], config) -> (weights[T], truncated[T]); lr is 0 at masked-out tokens."""
RejectionFunction = Callable[[Tensor, Tensor, CorrectionConfig], Tensor]
"""(lr[T], sequence_ids[T], config) -> kept[T]; lr is 0 at masked-out tokens."""


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _sequence_ratio(log_ratio: Tensor, sequence_ids: Tensor) -> Tensor:
    return _ratio(segment_sum(log_ratio, sequence_ids, count_segments(sequence_ids)))[sequence_ids]


def no_weight(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    return torch.ones_like(log_ratio), torch.zeros_like(log_ratio, dtype=torch.bool)


def token_truncation(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """`w = min(exp(clamp(lr, -20, 20)), cap)`."""
    ratio = _ratio(log_ratio)
    return ratio.clamp(max=config.cap), ratio > config.cap


def sequence_truncation(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """`w = min(exp(clamp(sum_t lr, -20, 20)), cap)`, the same for all tokens of a sequence."""
    ratio = _sequence_ratio(log_ratio, sequence_ids)
    return ratio.clamp(max=config.cap), ratio > config.cap


def band(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """IcePop: `w = ratio` within [band_low, band_high] (inclusive), else 0. Nothing is truncated."""
    ratio = _ratio(log_ratio)
    inside = (ratio >= config.band_low) & (ratio <= config.band_high)
    return apply_mask(ratio, inside), torch.zeros_like(inside)


def no_rejection(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> Tensor:
    return torch.ones_like(log_ratio, dtype=torch.bool)


def token_rejection(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> Tensor:
    """Keep a token if its ratio is within [rejection_low, rejection_high]."""
    ratio = _ratio(log_ratio)
    return (ratio >= config.rejection_low) & (ratio <= config.rejection_high)


def sequence_rejection(log_ratio: Tensor, sequence_ids: Tensor, config: CorrectionConfig) -> Tensor:
    """Keep a sequence if the product of its ratios is within [rejection_low, rejection_high]."""
    ratio = _sequence_ratio(log_ratio, sequence_ids)
    return (ratio >= config.rejection_low) & (ratio <= config.rejection_high)


WEIGHTS: dict[str, WeightFunction] = {
    "none": no_weight, "token_truncation": token_truncation, "sequence_truncation": sequence_truncation, "band": band
}  # fmt: skip
REJECTIONS: dict[str, RejectionFunction] = {
    "none": no_rejection, "token": token_rejection, "sequence": sequence_rejection
}  # fmt: skip


def correct(
    numerator_log_probs: Tensor,
    behaviour_log_probs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    config: CorrectionConfig,
) -> Correction:
    log_ratio = apply_mask((numerator_log_probs - behaviour_log_probs).detach(), mask)
    weights, truncated = WEIGHTS[config.weight_name](log_ratio, sequence_ids, config)
    kept = mask.bool() & REJECTIONS[config.rejection](log_ratio, sequence_ids, config)
    weights = apply_mask(weights, kept)
    zero = log_ratio.new_zeros(1)
    ratio = apply_mask(_ratio(log_ratio), mask)
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
class Mismatch:
    """How much the log-probs of learner and engine differ for the same weights. `a + b` joins parts of a batch."""

    sum_abs_difference: Tensor
    num_tokens: Tensor

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(self.sum_abs_difference + other.sum_abs_difference, self.num_tokens + other.num_tokens)

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
    return Mismatch(difference.sum(), same_version.sum())
