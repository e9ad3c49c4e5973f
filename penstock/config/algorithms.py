"""Configuration of the algorithms."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.base import Config

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
WeightName = Literal["none", "token_truncation", "sequence_truncation", "band"]
RejectionName = Literal["none", "token", "sequence"]
PenaltyName = Literal["k1", "abs", "k2", "k3"]

ADVANTAGE_NAMES = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "remax", "opo", "grpo_passk", "gpg",
    "gdpo",
)  # fmt: skip
COMPARING_ADVANTAGES = ("rloo", "opo", "grpo_passk")
"""Estimators that give a group of one sample the advantage 0."""
GROUP_ADVANTAGES = ("grpo", "gpg")
"""Estimators whose only baseline is the group: a group of one sample gets its reward."""
LOSS_NAMES = (
    "ppo", "gspo", "cispo", "reinforce", "gpg", "geo_mean", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro",
)  # fmt: skip
_OF_SEQUENCES = ("gspo", "geo_mean", "sapo")
"""Losses that are averaged within each sequence first."""
_SEQUENCE_CLIP = (3e-4, 4e-4)
_TOKEN_CLIP = (0.2, 0.2)


def check_name(kind: str, name: str, known: Collection[str]) -> str:
    """Return `name` if it is known or an import path. Otherwise raise a ValueError that suggests the nearest name."""
    module, colon, function = name.partition(":")
    if name in known or (colon and module and function):
        return name
    nearest = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"unknown {kind} {name!r}: {hint}known names: {', '.join(known)}; give your own as path/file.py:function"
        " or package.module:function"
    )


def _needs_length(aggregation: Aggregation | None, constant_length: int | None) -> tuple[bool, str]:
    is_missing = aggregation == "seq-mean-token-sum-norm" and constant_length is None
    return is_missing, "aggregation seq-mean-token-sum-norm needs constant_length, in tokens"


class AdvantageConfig(Config):
    """How advantages are computed from rewards."""

    name: Annotated[str, AfterValidator(lambda name: check_name("advantage", name, ADVANTAGE_NAMES))] = "grpo"
    """Estimator: `gae`, `grpo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `rloo`, `remax`, `opo`,
    `grpo_passk`, `gpg`, `gdpo`, or your own as `path/file.py:function` or `package.module:function`: see
    docs/algorithms.md#your-own-advantage-or-loss."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per trained token. Used by `gae` and `reinforce_plus_plus`."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Trace decay of `gae`: 1 is the Monte Carlo return minus the value, 0 is the one-step error."""
    normalize_by_std: bool = True
    """Divide by the standard deviation of the group's rewards (`grpo`, `grpo_passk`, `gdpo`). False is Dr.GRPO."""
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward, by name, that `gdpo` normalizes separately and a custom advantage gets as `reward_parts`."""
    reward_weights: tuple[float, ...] | None = None
    """Weights of `reward_keys` in the sum of `gdpo`. None means 1 for each."""
    greedy_baseline: bool | None = None
    """Add one greedy sample to each group, which is scored but not trained on. None means only for `remax`."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        name, is_known, weights = self.name, self.name in ADVANTAGE_NAMES, self.reward_weights
        return (
            (name == "remax" and self.greedy_baseline is False,
             "advantage remax needs the greedy sample: omit greedy_baseline"),
            (self.greedy_baseline and is_known and name != "remax",
             f"advantage {name} does not use a greedy sample: omit greedy_baseline"),
            (name == "gdpo" and not self.reward_keys,
             "advantage gdpo needs reward_keys: the parts of the reward that it normalizes"),
            (self.reward_keys and is_known and name != "gdpo",
             f"advantage {name} does not use reward_keys: omit them, or choose gdpo"),
            (weights is not None and len(weights) != len(self.reward_keys),
             "reward_weights needs one number for each of reward_keys"),
        )  # fmt: skip

    @property
    def has_baseline(self) -> bool:
        return self.name == "remax" if self.greedy_baseline is None else self.greedy_baseline


class LossConfig(Config):
    """The policy loss and how it is averaged over tokens."""

    name: Annotated[str, AfterValidator(lambda name: check_name("loss", name, LOSS_NAMES))] = "ppo"
    """Policy loss: `ppo`, `gspo`, `cispo`, `reinforce`, `gpg`, `geo_mean`, `sapo`, `clip_cov`, `kl_cov`, `dppo_tv`,
    `dppo_kl`, `dro`, or your own, named like an advantage: see docs/algorithms.md#your-own-advantage-or-loss."""
    clip_low: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped below 1 - clip_low. None means 3e-4 for `gspo` and 0.2 for the others. `dppo_tv`
    and `dppo_kl`: the largest divergence of a token whose probability falls."""
    clip_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped above 1 + clip_high. None means 4e-4 for `gspo` and 0.2 for the others; DAPO uses
    0.28. `dppo_tv` and `dppo_kl`: the largest divergence of a token whose probability rises."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Bound on the loss of a negative advantage (`ppo`) or on the ratio (`dppo_tv`, `dppo_kl`). None means no bound."""
    ratio_cap: float = Field(default=2.0, gt=0)
    """Upper bound that `reinforce` puts on the ratio of the current to the behaviour policy."""
    tau_positive: float = Field(default=1.0, gt=0)
    """How steeply `sapo` closes its gate for tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same for tokens with a negative advantage."""
    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """Share of a micro-batch's tokens that `clip_cov` excludes and `kl_cov` penalizes, at least one token."""
    cov_low: float = 1.0
    """`clip_cov` excludes tokens whose covariance of advantage and log-prob is above this."""
    cov_high: float = 5.0
    """`clip_cov` excludes tokens whose covariance is below this."""
    cov_kl_coefficient: float = Field(default=0.1, ge=0)
    """Weight of the penalty |lp - old| that `kl_cov` adds to tokens with the largest covariance."""
    dro_beta: float | None = Field(default=None, gt=0)
    """Weight of the penalty (lp - old)^2 / 2 of `dro`, which needs it."""
    aggregation: Aggregation | None = None
    """How token losses become one number. None means `seq-mean-token-mean` for `gspo`, `geo_mean` and `sapo`, and
    `token-mean` for the others."""
    constant_length: int | None = Field(default=None, ge=1)
    """Tokens that `seq-mean-token-sum-norm`, which needs it, divides by: usually the longest allowed response."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus, which is the policy's mean entropy at trained tokens. 0 means no bonus."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return (
            _needs_length(self.aggregation, self.constant_length),
            (self.name == "dro" and self.dro_beta is None, "loss dro needs dro_beta, the weight of its penalty"),
        )

    @property
    def epsilon_low(self) -> float:
        return self._default_clip[0] if self.clip_low is None else self.clip_low

    @property
    def epsilon_high(self) -> float:
        return self._default_clip[1] if self.clip_high is None else self.clip_high

    @property
    def aggregation_mode(self) -> Aggregation:
        return self.aggregation or ("seq-mean-token-mean" if self.name in _OF_SEQUENCES else "token-mean")

    @property
    def _default_clip(self) -> tuple[float, float]:
        return _SEQUENCE_CLIP if self.name == "gspo" else _TOKEN_CLIP


class CorrectionConfig(Config):
    """Off-policy correction for samples from an older policy, or from an engine whose log-probs differ."""

    mode: Literal["bypass", "decoupled", "none"] = "decoupled"
    """`bypass` uses the behaviour policy as the proximal policy. `decoupled` computes the proximal policy and weights
    the loss by proximal / behaviour. `none` computes it without weighting the loss."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """Where `decoupled` and `none` get the proximal policy: `recomputed` by a forward pass before the step (a step of a
    single update needs no extra pass), or `interpolated` between the behaviour and the current policy, log-linearly."""
    interpolation: float = Field(default=0.5, ge=0, le=1)
    """Share of the current policy in the interpolation: 0 is the behaviour policy, 1 is the current policy."""
    weight: WeightName | None = None
    """How the importance weight is bounded. None means `token_truncation` in mode `decoupled`, `none` in the others."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight under `token_truncation` and `sequence_truncation`."""
    band_low: float = Field(default=0.5, gt=0)
    """`band` sets the weight of a token to 0 if its ratio is below this."""
    band_high: float = Field(default=5.0, gt=0)
    """`band` sets the weight of a token to 0 if its ratio is above this."""
    rejection: RejectionName = "none"
    """Exclude from the loss the tokens (`token`), or the sequences (`sequence`), whose ratio is outside the bounds."""
    rejection_low: float = Field(default=0.5, gt=0)
    """Smallest ratio that rejection keeps."""
    rejection_high: float = Field(default=2.0, gt=0)
    """Largest ratio that rejection keeps."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return (
            (self.mode != "decoupled" and self.weight not in (None, "none"),
             f"weight {self.weight} applies in mode decoupled only; omit it in mode {self.mode}"),
            (self.band_low >= self.band_high, "band_low must be below band_high"),
            (self.rejection_low >= self.rejection_high, "rejection_low must be below rejection_high"),
        )  # fmt: skip

    @property
    def recomputes(self) -> bool:
        """Whether the proximal policy is the policy before the step, and so is computed from its weights."""
        return self.mode != "bypass" and self.proximal == "recomputed"

    @property
    def weight_name(self) -> WeightName:
        return self.weight or ("token_truncation" if self.mode == "decoupled" else "none")


class KLConfig(Config):
    """The penalty for moving away from the reference policy."""

    placement: Literal["none", "reward", "loss", "both"] = "none"
    """Where the penalty applies: token rewards, policy loss, or both. With `none`, no reference model is loaded."""
    penalty: PenaltyName = "k3"
    """Estimator of a token's KL divergence from the log-probs of the sampled token."""
    coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the penalty; the adaptive controller starts from it."""
    loss_penalty: PenaltyName | None = None
    """With placement `both`: the estimator in the loss. None means `penalty`."""
    loss_coefficient: float | None = Field(default=None, ge=0)
    """With placement `both`: fixed weight of the penalty in the loss. None means the weight in the reward."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` changes the coefficient so that the measured KL approaches `target`."""
    target: float = Field(default=0.1, gt=0)
    """KL divergence per token that the adaptive controller aims for."""
    horizon: int = Field(default=10000, ge=1)
    """Number of sequences over which the adaptive controller corrects an error. A larger number reacts more slowly."""

    @property
    def in_reward(self) -> bool:
        return self.placement in ("reward", "both")

    @property
    def in_loss(self) -> bool:
        return self.placement in ("loss", "both")

    def loss_factor(self, coefficient: float) -> float:
        """The weight of the penalty in the loss. `coefficient` is the controller's."""
        return coefficient if self.loss_coefficient is None else self.loss_coefficient

    def refused(self) -> tuple[tuple[object, str], ...]:
        is_set = self.loss_penalty is not None or self.loss_coefficient is not None
        text = "kl.loss_penalty and kl.loss_coefficient need kl.placement both; else use penalty, coefficient"
        return ((self.placement != "both" and is_set, text),)


class ValueLossConfig(Config):
    """The critic's loss."""

    clip: float = Field(default=0.5, gt=0)
    """A new value is clipped to this distance from the value at the start of the step."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens are reduced to one number."""
    constant_length: int | None = Field(default=None, ge=1)
    """Number of tokens that `seq-mean-token-sum-norm` divides by. Only needed for that aggregation."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return (_needs_length(self.aggregation, self.constant_length),)


class OverlongConfig(Config):
    """DAPO's soft penalty for responses close to the length limit."""

    max_num_tokens: int = Field(ge=1)
    """Length in tokens at which the penalty reaches `factor`; usually the longest allowed response."""
    buffer_num_tokens: int = Field(default=4096, ge=1)
    """Number of tokens before `max_num_tokens` at which the penalty starts. It grows linearly from there."""
    factor: float = Field(default=1.0, ge=0)
    """Penalty at `max_num_tokens`."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        return ((self.buffer_num_tokens > self.max_num_tokens, "buffer_num_tokens must not exceed max_num_tokens"),)


class AlgorithmConfig(Config):
    """The training algorithm. The defaults are GRPO with the decoupled PPO loss."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Advantage estimator."""
    loss: LossConfig = LossConfig()
    """Policy loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    kl: KLConfig = KLConfig()
    """KL penalty towards the reference policy."""
    value_loss: ValueLossConfig = ValueLossConfig()
    """Critic loss. Only used with the advantage `gae`."""
    overlong: OverlongConfig | None = None
    """Length penalty in the reward. None means no penalty."""

    def refused(self) -> tuple[tuple[object, str], ...]:
        shaped = "kl.placement" if self.kl.in_reward else "overlong" if self.overlong is not None else ""
        return (
            (self.loss.name == "reinforce" and self.correction.weight_name != "none",
             "loss reinforce weights with current / behaviour already: set correction.mode to bypass"),
            (self.advantage.name == "gdpo" and shaped,
             f"advantage gdpo uses reward_keys alone, so {shaped} would not change it: omit it"),
        )  # fmt: skip
