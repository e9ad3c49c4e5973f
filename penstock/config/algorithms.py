"""Configuration of the algorithms."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.config.base import Config

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
WeightName = Literal["none", "token_truncation", "sequence_truncation", "band"]
RejectionName = Literal["none", "token", "sequence"]
PenaltyName = Literal["k1", "abs", "k2", "k3"]

ADVANTAGE_NAMES = ("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "remax", "opo")
LOSS_NAMES = ("ppo", "gspo", "cispo", "reinforce")
_SEQUENCE_CLIP = (3e-4, 4e-4)
_TOKEN_CLIP = (0.2, 0.2)


def check_name(kind: str, name: str, known: Collection[str]) -> str:
    """Return `name` if it is known or an import path; else raise a ValueError that names the nearest known one."""
    module, colon, function = name.partition(":")
    if name in known or (colon and module and function):
        return name
    nearest = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ValueError(
        f"unknown {kind} {name!r}: {hint}known are {', '.join(known)}; a custom one is 'package.module:function'"
    )


class AdvantageConfig(Config):
    """How rewards become advantages."""

    name: str = "grpo"
    """One of ADVANTAGE_NAMES, or `package.module:function` with the signature (AdvantageInputs, AdvantageConfig)."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of one trained token; used by gae and reinforce_plus_plus."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Trace decay of gae: 1 is Monte Carlo minus the value, 0 the one-step error."""
    normalize_by_std: bool = True
    """grpo divides by the standard deviation of its group; False is Dr.GRPO."""
    greedy_baseline: bool | None = None
    """Rollout servers add a greedy sample to each group, which is scored and not trained. None: for remax only."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return check_name("advantage", name, ADVANTAGE_NAMES)

    @model_validator(mode="after")
    def _baseline_is_used(self) -> Self:
        if self.name == "remax" and self.greedy_baseline is False:
            raise ValueError("advantage remax compares with the greedy sample: leave greedy_baseline out")
        if self.greedy_baseline and self.name in ADVANTAGE_NAMES and self.name != "remax":
            raise ValueError(f"advantage {self.name} has no use for a greedy sample: leave greedy_baseline out")
        return self

    @property
    def has_baseline(self) -> bool:
        """`greedy_baseline`, or the default of the estimator."""
        return self.name == "remax" if self.greedy_baseline is None else self.greedy_baseline


class LossConfig(Config):
    """The policy loss and how its tokens are averaged."""

    name: str = "ppo"
    """One of LOSS_NAMES, or `package.module:function` with the signature (LossInputs, LossConfig)."""
    clip_low: float | None = Field(default=None, ge=0)
    """The ratio is clipped below at 1 - clip_low. None takes the loss's default: 3e-4 for gspo, else 0.2."""
    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above at 1 + clip_high. None: 4e-4 for gspo, else 0.2. DAPO's clip-higher is 0.28."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """ppo bounds the loss of a negative advantage A at -dual_clip * A; None leaves it unbounded."""
    ratio_cap: float = Field(default=2.0, gt=0)
    """reinforce truncates the ratio of the current to the behaviour policy here."""
    aggregation: Aggregation | None = None
    """How tokens become one number. None: seq-mean-token-mean for gspo, else token-mean."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divisor in tokens of seq-mean-token-sum-norm, usually the longest response allowed; needed there only."""

    @field_validator("name")
    @classmethod
    def _name_is_known(cls, name: str) -> str:
        return check_name("loss", name, LOSS_NAMES)

    @model_validator(mode="after")
    def _constant_length_is_given(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.constant_length is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs constant_length, in tokens")
        return self

    @property
    def epsilon_low(self) -> float:
        """`clip_low`, or the default of the loss."""
        return self._default_clip[0] if self.clip_low is None else self.clip_low

    @property
    def epsilon_high(self) -> float:
        """`clip_high`, or the default of the loss."""
        return self._default_clip[1] if self.clip_high is None else self.clip_high

    @property
    def aggregation_mode(self) -> Aggregation:
        """`aggregation`, or the default of the loss."""
        return self.aggregation or ("seq-mean-token-mean" if self.name == "gspo" else "token-mean")

    @property
    def _default_clip(self) -> tuple[float, float]:
        return _SEQUENCE_CLIP if self.name == "gspo" else _TOKEN_CLIP


class CorrectionConfig(Config):
    """What is done about data that another policy, or another engine, has produced."""

    mode: Literal["bypass", "decoupled", "none"] = "decoupled"
    """bypass: the proximal policy is the behaviour policy. decoupled: it is computed, and the loss is weighted with
    proximal / behaviour. none: it is computed, and the loss is not weighted."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """decoupled and none: a forward pass at the start of the step, or a log-linear mix of behaviour and current."""
    interpolation: float = Field(default=0.5, ge=0, le=1)
    """Share of the current policy in the mix: 0 is the behaviour policy, 1 the current one."""
    weight: WeightName | None = None
    """None: token_truncation in decoupled mode, none in the others."""
    cap: float = Field(default=2.0, gt=0)
    """Largest weight that token_truncation and sequence_truncation give."""
    band_low: float = Field(default=0.5, gt=0)
    """band zeroes the weight of tokens whose ratio is below."""
    band_high: float = Field(default=5.0, gt=0)
    """band zeroes the weight of tokens whose ratio is above."""
    rejection: RejectionName = "none"
    """Which tokens leave the loss: those whose ratio, or whose sequence's product of ratios, is outside the bounds."""
    rejection_low: float = Field(default=0.5, gt=0)
    """Smallest ratio that is kept."""
    rejection_high: float = Field(default=2.0, gt=0)
    """Largest ratio that is kept."""

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
    def weight_name(self) -> WeightName:
        """`weight`, or the default of the mode."""
        return self.weight or ("token_truncation" if self.mode == "decoupled" else "none")


class KLConfig(Config):
    """The penalty for leaving the reference policy."""

    placement: Literal["none", "reward", "loss"] = "none"
    """none: no reference policy is needed. reward: subtracted from token rewards. loss: added to the policy loss."""
    penalty: PenaltyName = "k3"
    """Estimator of one token's KL from the log-probs of the sampled token."""
    coefficient: float = Field(default=1e-3, ge=0)
    """Weight of the penalty, and where the adaptive controller starts."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive steers the coefficient so that the measured KL approaches `target`."""
    target: float = Field(default=0.1, gt=0)
    """KL per token that the adaptive controller aims at."""
    horizon: int = Field(default=10000, ge=1)
    """Sequences over which the adaptive controller corrects an error; larger is slower."""


class ValueLossConfig(Config):
    """The critic's loss."""

    clip: float = Field(default=0.5, gt=0)
    """A new value is clipped to this distance from the value of the start of the step."""
    aggregation: Aggregation = "token-mean"
    """How tokens become one number."""
    constant_length: int | None = Field(default=None, ge=1)
    """Divisor in tokens of seq-mean-token-sum-norm; needed there only."""

    @model_validator(mode="after")
    def _constant_length_is_given(self) -> Self:
        if self.aggregation == "seq-mean-token-sum-norm" and self.constant_length is None:
            raise ValueError("aggregation seq-mean-token-sum-norm needs constant_length, in tokens")
        return self


class OverlongConfig(Config):
    """DAPO's soft penalty for responses that come close to the length limit."""

    max_num_tokens: int = Field(ge=1)
    """Longest response; there the penalty is `factor`."""
    buffer_num_tokens: int = Field(default=4096, ge=1)
    """The penalty starts this far before the longest response and grows linearly."""
    factor: float = Field(default=1.0, ge=0)
    """Penalty at the longest response."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer_num_tokens > self.max_num_tokens:
            raise ValueError("buffer_num_tokens must not exceed max_num_tokens")
        return self


class AlgorithmConfig(Config):
    """All of an algorithm. The defaults are GRPO with the decoupled PPO loss."""

    advantage: AdvantageConfig = AdvantageConfig()
    """Rewards to advantages."""
    loss: LossConfig = LossConfig()
    """Policy loss."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction."""
    kl: KLConfig = KLConfig()
    """Penalty towards the reference policy."""
    value_loss: ValueLossConfig = ValueLossConfig()
    """Critic loss; read where the advantage is gae."""
    overlong: OverlongConfig | None = None
    """Length penalty in the reward; None leaves it out."""

    @model_validator(mode="after")
    def _corrects_once(self) -> Self:
        if self.loss.name == "reinforce" and self.correction.weight_name != "none":
            raise ValueError("loss reinforce weights with current / behaviour already: set correction.mode to bypass")
        return self
