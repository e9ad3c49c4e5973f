"""Configuration of the algorithms."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.base import Config

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
WeightName = Literal["none", "token_truncation", "sequence_truncation", "band"]
RejectionName = Literal["none", "token", "sequence"]
PenaltyName = Literal["k1", "abs", "k2", "k3"]

ADVANTAGE_NAMES = (
    "gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "remax", "opo", "grpo_passk", "gpg",
    "gdpo",
)  # fmt: skip
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


class AdvantageConfig(Config):
    """How advantages are computed from rewards."""

    name: str = "grpo"
    """Advantage estimator: `gae`, `grpo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `rloo`, `remax`,
    `opo`, `grpo_passk`, `gpg`, `gdpo`, or a function of your own as `path/file.py:function` or
    `package.module:function`: see docs/algorithms.md#your-own-advantage-or-loss."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per trained token. Used by `gae` and `reinforce_plus_plus`."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Trace decay of `gae`: 1 is the Monte Carlo return minus the value, 0 is the one-step error."""
    normalize_by_std: bool = True
    """Let `grpo`, `grpo_passk` and `gdpo` divide by the standard deviation of the group's rewards. False is
    Dr.GRPO."""
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward that `gdpo` normalizes one by one: names in the mapping that the reward function returns. A
    custom advantage gets them as `reward_parts`."""
    reward_weights: tuple[float, ...] | None = None
    """Weights of `reward_keys` in the sum of `gdpo`. None: 1 for each."""
    greedy_baseline: bool | None = None
    """Add one greedy sample to each group, which is scored but not trained on. None: only for `remax`."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return check_name("advantage", name, ADVANTAGE_NAMES)

    @model_validator(mode="after")
    def _baseline_is_used(self) -> Self:
        if self.name == "remax" and self.greedy_baseline is False:
            raise ValueError("advantage remax needs the greedy sample: leave greedy_baseline out")
        if self.greedy_baseline and self.name in ADVANTAGE_NAMES and self.name != "remax":
            raise ValueError(f"advantage {self.name} does not use a greedy sample: leave greedy_baseline out")
        return self

    @model_validator(mode="after")
    def _reward_keys_are_used(self) -> Self:
        if self.name == "gdpo" and not self.reward_keys:
            raise ValueError("advantage gdpo needs reward_keys: the parts of the reward that it normalizes")
        if self.reward_keys and self.name in ADVANTAGE_NAMES and self.name != "gdpo":
            raise ValueError(f"advantage {self.name} does not use reward_keys: leave them out, or choose gdpo")
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_keys):
            raise ValueError("reward_weights needs one number for each of reward_keys")
        return self

    @property
    def has_baseline(self) -> bool:
        """`greedy_baseline`, or the estimator's default."""
        return self.name == "remax" if self.greedy_baseline is None else self.greedy_baseline


class LossConfig(Config):
    """The policy loss and how it is averaged over tokens."""

    name: str = "ppo"
    """Policy loss: `ppo`, `gspo`, `cispo`, `reinforce`, `gpg`, `geo_mean`, `sapo`, `clip_cov`, `kl_cov`, `dppo_tv`,
    `dppo_kl`, `dro`, or a function of your own as `path/file.py:function` or `package.module:function`: see
    docs/algorithms.md#your-own-advantage-or-loss."""
    clip_low: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped from below at 1 - clip_low. None: 3e-4 for `gspo`, 0.2 for the others. For
    `dppo_tv` and `dppo_kl`, the largest divergence of a token whose probability falls."""
    clip_high: float | None = Field(default=None, ge=0)
    """The importance ratio is clipped from above at 1 + clip_high. None: 4e-4 for `gspo`, 0.2 for the others. DAPO's
    clip-higher is 0.28. For `dppo_tv` and `dppo_kl`, the largest divergence of a token whose probability rises."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """`ppo` bounds the loss of a negative advantage A at -dual_clip * A. `dppo_tv` and `dppo_kl` bound the ratio at it.
    None: no bound."""
    ratio_cap: float = Field(default=2.0, gt=0)
    """Upper bound that `reinforce` puts on the ratio of the current to the behaviour policy."""
    tau_positive: float = Field(default=1.0, gt=0)
    """How steeply `sapo` closes its gate for tokens with a positive advantage."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same for tokens with a negative advantage."""
    cov_share: float = Field(default=2e-4, gt=0, le=1)
    """Share of a micro-batch's tokens that `clip_cov` leaves out and `kl_cov` penalises, at least one token."""
    cov_low: float = 1.0
    """`clip_cov` leaves out tokens whose covariance of advantage and log-prob is above this."""
    cov_high: float = 5.0
    """`clip_cov` leaves out tokens whose covariance is below this."""
    cov_kl_coefficient: float = Field(default=0.1, ge=0)
    """Weight of the penalty |lp - old| that `kl_cov` adds to tokens with the largest covariance."""
    dro_beta: float | None = Field(default=None, gt=0)
    """Weight of the penalty (lp - old)^2 / 2 of `dro`, which needs it."""
    aggregation: Aggregation | None = None
    """How the losses of tokens are reduced to one number. None: `seq-mean-token-mean` for `gspo`, `geo_mean` and
    `sapo`, `token-mean` for the others."""
    constant_length: int | None = Field(default=None, ge=1)
    """Number of tokens that `seq-mean-token-sum-norm` divides by, usually the longest allowed response. Only needed for
    that aggregation."""

    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy at trained tokens, by `aggregation`, is multiplied by
    it and subtracted from the loss. 0: no bonus."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return check_name("loss", name, LOSS_NAMES)

    @model_validator(mode="after")
    def _constant_length_is_given(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.constant_length is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs constant_length, in tokens")
        if self.name == "dro" and self.dro_beta is None:
            raise ValueError("loss dro needs dro_beta, the weight of its penalty")
        return self

    @property
    def epsilon_low(self) -> float:
        """`clip_low`, or the loss's default."""
        return self._default_clip[0] if self.clip_low is None else self.clip_low

    @property
    def epsilon_high(self) -> float:
        """`clip_high`, or the loss's default."""
        return self._default_clip[1] if self.clip_high is None else self.clip_high

    @property
    def aggregation_mode(self) -> Aggregation:
        """`aggregation`, or the loss's default."""
        return self.aggregation or ("seq-mean-token-mean" if self.name in _OF_SEQUENCES else "token-mean")

    @property
    def _default_clip(self) -> tuple[float, float]:
        return _SEQUENCE_CLIP if self.name == "gspo" else _TOKEN_CLIP


class CorrectionConfig(Config):
    """Off-policy correction for samples from an older policy, or from an engine whose log-probs differ."""

    mode: Literal["bypass", "decoupled", "none"] = "decoupled"
    """`bypass` uses the behaviour policy as the proximal policy. `decoupled` computes the proximal policy and weights
    the loss by proximal / behaviour. `none` computes the proximal policy and does not weight the loss."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """How `decoupled` and `none` get the proximal policy: `recomputed` by a forward pass of the weights before the
    step, or `interpolated` as a log-linear mix of the behaviour and the current policy. A step of a single update needs
    no pass of its own for it."""
    interpolation: float = Field(default=0.5, ge=0, le=1)
    """Share of the current policy in the interpolation: 0 is the behaviour policy, 1 is the current policy."""
    weight: WeightName | None = None
    """How the importance weight is bounded. None: `token_truncation` in mode `decoupled`, `none` in the others."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight under `token_truncation` and `sequence_truncation`."""
    band_low: float = Field(default=0.5, gt=0)
    """`band` sets the weight of a token to 0 if its ratio is below this."""
    band_high: float = Field(default=5.0, gt=0)
    """`band` sets the weight of a token to 0 if its ratio is above this."""
    rejection: RejectionName = "none"
    """Leave tokens out of the loss. `token`: those whose ratio is outside the bounds. `sequence`: all tokens of a
    sequence whose product of ratios is outside them."""
    rejection_low: float = Field(default=0.5, gt=0)
    """Smallest ratio that rejection keeps."""
    rejection_high: float = Field(default=2.0, gt=0)
    """Largest ratio that rejection keeps."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.mode != "decoupled" and self.weight not in (None, "none"):
            raise ValueError(f"weight {self.weight} applies in mode decoupled only; leave it out in mode {self.mode}")
        if self.band_low >= self.band_high:
            raise ValueError("band_low must be below band_high")
        if self.rejection_low >= self.rejection_high:
            raise ValueError("rejection_low must be below rejection_high")
        return self

    @property
    def recomputes(self) -> bool:
        """Whether the proximal policy is the policy before the step, and so is computed from its weights."""
        return self.mode != "bypass" and self.proximal == "recomputed"

    @property
    def weight_name(self) -> WeightName:
        """`weight`, or the mode's default."""
        return self.weight or ("token_truncation" if self.mode == "decoupled" else "none")


class KLConfig(Config):
    """The penalty for moving away from the reference policy."""

    placement: Literal["none", "reward", "loss", "both"] = "none"
    """`none`: no penalty, and no reference model is loaded. `reward`: subtracted from token rewards. `loss`: added to
    the policy loss. `both`: subtracted from token rewards and added to the loss."""
    penalty: PenaltyName = "k3"
    """Estimator of a token's KL divergence from the log-probs of the sampled token."""
    coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the penalty; the adaptive controller starts from it."""
    loss_penalty: PenaltyName | None = None
    """With placement `both`: the estimator in the loss. None: `penalty`."""
    loss_coefficient: float | None = Field(default=None, ge=0)
    """With placement `both`: weight of the penalty in the loss, which no controller changes. None: the weight in the
    reward."""
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

    @model_validator(mode="after")
    def _loss_has_its_own_only_in_both(self) -> Self:
        if self.placement != "both" and (self.loss_penalty is not None or self.loss_coefficient is not None):
            raise ValueError(
                "kl.loss_penalty and kl.loss_coefficient need kl.placement both; else use penalty, coefficient"
            )
        return self


class ValueLossConfig(Config):
    """The critic's loss."""

    clip: float = Field(default=0.5, gt=0)
    """A new value is clipped to this distance from the value at the start of the step."""
    aggregation: Aggregation = "token-mean"
    """How the losses of tokens are reduced to one number."""
    constant_length: int | None = Field(default=None, ge=1)
    """Number of tokens that `seq-mean-token-sum-norm` divides by. Only needed for that aggregation."""

    @model_validator(mode="after")
    def _constant_length_is_given(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.constant_length is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs constant_length, in tokens")
        return self


class OverlongConfig(Config):
    """DAPO's soft penalty for responses close to the length limit."""

    max_num_tokens: int = Field(ge=1)
    """Length in tokens at which the penalty reaches `factor`; usually the longest allowed response."""
    buffer_num_tokens: int = Field(default=4096, ge=1)
    """Number of tokens before `max_num_tokens` at which the penalty starts. It grows linearly from there."""
    factor: float = Field(default=1.0, ge=0)
    """Penalty at `max_num_tokens`."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_num_tokens > self.max_num_tokens:
            raise ValueError("buffer_num_tokens must not exceed max_num_tokens")
        return self


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
    """Length penalty in the reward. None: no penalty."""

    @model_validator(mode="after")
    def _corrects_once(self) -> Self:
        if self.loss.name == "reinforce" and self.correction.weight_name != "none":
            raise ValueError("loss reinforce weights with current / behaviour already: set correction.mode to bypass")
        return self

    @model_validator(mode="after")
    def _shapes_rewards_that_are_used(self) -> Self:
        shaped = "kl.placement" if self.kl.in_reward else "overlong" if self.overlong is not None else ""
        if self.advantage.name == "gdpo" and shaped:
            raise ValueError(f"advantage gdpo uses reward_keys alone, so {shaped} would not change it: leave it out")
        return self
