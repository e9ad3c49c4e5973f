"""Advantage estimators. Each is a pure function (AdvantageInputs, AdvantageConfig) -> AdvantageOutputs. A function of a
user may return the advantages of the tokens alone.

Call these on the whole batch: groups must be complete, and whitening (`W`) uses all tokens that it is given. In every
estimator `R = sum_t r_t` over the trained tokens of a sequence, and `mu` is the mean of R over its group. A sequence
without a trained token has no R, and is not a member of its group. Sequences of one episode, such as the paths of a
session, are one sample of their group, in which each counts for its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.config.algorithms import AdvantageConfig, OverlongConfig
from penstock.errors import ConfigError
from penstock_learner.algorithms.aggregation import (
    apply_mask,
    find_function,
    reverse_scan_masked,
    segment_min,
    segment_sum,
    shift_left,
    whiten,
)

_STD_EPSILON = 1e-6


@dataclass(frozen=True)
class AdvantageInputs:
    """A whole batch. For example, two sequences of one group, the first with a tool's answer in the middle:
    `sequence_ids = [0, 0, 0, 1]`, `group_ids = [7, 7]`, `mask = [1, 0, 1, 1]`, `token_rewards = [0, 0, 1, 0]`."""

    token_rewards: Tensor
    """[T] reward of each token, usually nonzero at the last trained token of a sequence only."""
    mask: Tensor
    """[T] nonzero where the token is trained."""
    sequence_ids: Tensor
    """[T] int64, non-decreasing, below S."""
    group_ids: Tensor
    """[S] int64. Sequences of the same group have the same id; the ids can be any integers."""
    values: Tensor | None = None
    """[T] the critic's values, which gae needs."""
    is_greedy: Tensor | None = None
    """[S] bool, true for the greedy sample of each group, which remax needs."""
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)
    """[S] each of the reward's parts that `advantage.reward_keys` names."""
    episodes: Tensor | None = None
    """[S] int64. Sequences of a group with the same number are one sample; 0 for a sequence that is one itself."""

    def __post_init__(self) -> None:
        num_tokens = self.token_rewards.shape[0]
        for name in ("mask", "sequence_ids", "values"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.shape != (num_tokens,):
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, token_rewards has {num_tokens} tokens")
        if self.is_greedy is not None and self.is_greedy.shape != self.group_ids.shape:
            raise ValueError(f"is_greedy has shape {tuple(self.is_greedy.shape)}, group_ids {self.group_ids.shape}")
        if bool((self.sequence_ids.diff() < 0).any()):
            raise ValueError("sequence_ids must be non-decreasing: pack each sequence's tokens together, in order")

    @property
    def num_sequences(self) -> int:
        return int(self.group_ids.shape[0])


@dataclass(frozen=True)
class AdvantageOutputs:
    """Results without gradient. All three tensors are exactly 0 (False) at masked-out tokens."""

    advantages: Tensor
    """[T] the advantage of each token."""
    loss_mask: Tensor
    """[T] bool, the tokens that the policy loss and its denominators count: `mask` without remax's greedy samples."""
    returns: Tensor | None = None
    """[T] `A + V` for gae (the critic's targets), G for reinforce_plus_plus and remax, None for the others."""


AdvantageFunction = Callable[[AdvantageInputs, AdvantageConfig], AdvantageOutputs | Tensor]


@dataclass(frozen=True)
class _Groups:
    """The total reward and the group of each sequence. `index[S]` numbers the groups 0..G-1. `is_member[S]` is false
    for a sequence without a trained token. `shares[S]` is 1 over the members of its episode, or 0. `sizes[S]` is the
    number of samples of its group."""

    rewards: Tensor
    index: Tensor
    is_member: Tensor
    shares: Tensor
    sizes: Tensor
    num_groups: int

    @classmethod
    def of(cls, inputs: AdvantageInputs, rewards: Tensor | None = None) -> _Groups:
        if rewards is None:
            token_rewards = apply_mask(inputs.token_rewards, inputs.mask)
            rewards = segment_sum(token_rewards, inputs.sequence_ids, inputs.num_sequences)
        num_trained = segment_sum(inputs.mask.bool().to(rewards.dtype), inputs.sequence_ids, inputs.num_sequences)
        is_member = num_trained > 0
        distinct, index = torch.unique(inputs.group_ids, return_inverse=True)
        num_groups = int(distinct.shape[0])
        shares = _shares(inputs.episodes, index, is_member, rewards.dtype)
        # Thirds of an episode do not add up to exactly 1.
        sizes = segment_sum(shares, index, num_groups).round()[index]
        return cls(rewards, index, is_member, shares, sizes, num_groups)

    def sum(self, per_sequence: Tensor) -> Tensor:
        """[S] the sum over the sequences of each sequence's group."""
        return segment_sum(per_sequence, self.index, self.num_groups)[self.index]

    def sum_samples(self, per_sequence: Tensor) -> Tensor:
        """[S] the sum over the samples of each sequence's group. A sample has the mean of its sequences."""
        return self.sum(per_sequence * self.shares)

    def centered(self) -> Tensor:
        """[S] `R - mu`, and 0 for sequences that are not members. Exactly 0 if a group's rewards are equal: the
        smallest is subtracted before the mean."""
        rewards = torch.where(self.is_member, self.rewards, torch.inf)
        lifted = apply_mask(rewards - segment_min(rewards, self.index, self.num_groups)[self.index], self.is_member)
        return apply_mask(lifted - self.sum_samples(lifted) / self.sizes.clamp(min=1), self.is_member)

    def centered_or_raw(self) -> Tensor:
        """[S] `R - mu`, with mu = 0 for a group of one."""
        return torch.where(self.sizes == 1, self.rewards, self.centered())

    def normalized(self, by_std: bool) -> Tensor:
        """[S] `(R - mu) / (sigma + 1e-6)`, or `R - mu`. A group of one has mu = 0."""
        centered = self.centered_or_raw()
        return centered / self.scale() if by_std else centered

    def scale(self) -> Tensor:
        """[S] `sigma + 1e-6` with unbiased sigma. A group of one has sigma = 1."""
        variance = self.sum_samples(self.centered().square()) / (self.sizes - 1).clamp(min=1)
        return torch.where(self.sizes == 1, 1.0, variance.sqrt()) + _STD_EPSILON


def _shares(episodes: Tensor | None, groups: Tensor, is_member: Tensor, dtype: torch.dtype) -> Tensor:
    """[S] 1 over the number of members of each sequence's episode, and 0 for a sequence that is not a member."""
    if episodes is None:
        return is_member.to(dtype)
    alone = -1 - torch.arange(len(episodes), device=episodes.device)
    names = torch.stack([groups, torch.where(episodes == 0, alone, episodes)], dim=1)
    distinct, index = torch.unique(names, dim=0, return_inverse=True)
    members = segment_sum(is_member.to(dtype), index, distinct.shape[0])[index]
    return is_member.to(dtype) / members.clamp(min=1)


def _broadcast(per_sequence: Tensor, inputs: AdvantageInputs) -> Tensor:
    return apply_mask(per_sequence[inputs.sequence_ids], inputs.mask)


def _outputs(inputs: AdvantageInputs, advantages: Tensor, returns: Tensor | None = None) -> AdvantageOutputs:
    return AdvantageOutputs(advantages, inputs.mask.bool(), returns)


def gae(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`delta_t = r_t + gamma V_{t+1} - V_t`, `A_t = delta_t + gamma lam A_{t+1}`, returns `A + V`, then `W(A)`. t + 1
    is the next trained token of the sequence: V and A skip tool output, and are 0 after the end."""
    if inputs.values is None:
        raise ValueError("advantage gae needs values: give the run a critic, or choose grpo or rloo")
    trained = inputs.mask.bool().nonzero().squeeze(1)
    values, ids = inputs.values[trained], inputs.sequence_ids[trained]
    deltas = torch.zeros_like(inputs.values)
    deltas[trained] = inputs.token_rewards[trained] + config.gamma * shift_left(values, ids) - values
    raw = reverse_scan_masked(deltas, config.gamma * config.lam, inputs.mask, inputs.sequence_ids)
    returns = apply_mask(raw + inputs.values, inputs.mask)
    return _outputs(inputs, whiten(raw, inputs.mask), returns)


def grpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`(R - mu) / (sigma + 1e-6)` with unbiased sigma, or `R - mu` if `normalize_by_std` is False (Dr.GRPO). A group of
    one has mu = 0 and sigma = 1."""
    return _outputs(inputs, _broadcast(_Groups.of(inputs).normalized(config.normalize_by_std), inputs))


def gdpo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`W(sum_k weight_k GRPO(R_k))`: each part R_k of the reward is normalized within its group by itself, so that a
    part with a large spread does not hide the others. The total reward is not used."""
    total = torch.zeros_like(inputs.token_rewards)
    for key, weight in zip(config.reward_keys, config.reward_weights or (1.0,) * len(config.reward_keys), strict=True):
        if key not in inputs.reward_parts:
            raise ValueError(f"advantage gdpo needs the part {key!r} of every sample's reward")
        part = _Groups.of(inputs, inputs.reward_parts[key].to(total.dtype)).normalized(config.normalize_by_std)
        total += weight * _broadcast(part, inputs)
    return _outputs(inputs, whiten(total, inputs.mask))


def reinforce_plus_plus(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`W(G)` with `G_t = r_t + gamma G_{t+1}`, which skips masked-out tokens."""
    returns = reverse_scan_masked(inputs.token_rewards, config.gamma, inputs.mask, inputs.sequence_ids)
    return _outputs(inputs, whiten(returns, inputs.mask), returns)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`W(R - mu)`. The weight of a sequence in W is its number of trained tokens. A group of one has mu = 0."""
    return _outputs(inputs, whiten(_broadcast(_Groups.of(inputs).centered_or_raw(), inputs), inputs.mask))


def rloo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`n / (n - 1) * (R - mu)`: R minus the mean of the others. A group of one gets 0."""
    groups = _Groups.of(inputs)
    leave_one_out = groups.centered() * groups.sizes / (groups.sizes - 1).clamp(min=1)
    return _outputs(inputs, _broadcast(leave_one_out, inputs))


def opo(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`R - sum(len R) / sum(len)` over the group, with len in trained tokens. A group of one gets 0."""
    groups = _Groups.of(inputs)
    lengths = segment_sum(inputs.mask.bool().to(groups.rewards.dtype), inputs.sequence_ids, inputs.num_sequences)
    centered = groups.centered()
    baseline = groups.sum(lengths * centered) / groups.sum(lengths).clamp(min=1)
    return _outputs(inputs, _broadcast(centered - baseline, inputs))


def grpo_passk(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`(R - R_second) / (sigma + 1e-6)` for the best sample of a group, 0 for all others (Pass@k). A group whose best
    reward is shared, and a group of one, get 0. Without the division if `normalize_by_std` is False."""
    groups = _Groups.of(inputs)
    rewards = torch.where(groups.is_member, groups.rewards, -torch.inf)
    is_best = groups.is_member & (rewards == -segment_min(-rewards, groups.index, groups.num_groups)[groups.index])
    others = torch.where(is_best, -torch.inf, rewards)
    second = -segment_min(-others, groups.index, groups.num_groups)[groups.index]
    is_alone = (groups.sum_samples(is_best.to(rewards.dtype)).round() == 1) & (groups.sizes > 1)
    gap = torch.where(is_best & is_alone, groups.rewards - second, 0.0)
    if config.normalize_by_std:
        gap = gap / groups.scale()
    return _outputs(inputs, _broadcast(gap, inputs))


def gpg(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`alpha (R - mu)`, alpha = samples / samples whose R is not 0, over the batch. A group of one has mu = 0."""
    groups = _Groups.of(inputs)
    num_rewarded = groups.shares[groups.rewards != 0].sum().clamp(min=1)
    alpha = groups.shares.sum() / num_rewarded
    return _outputs(inputs, _broadcast(alpha * groups.centered_or_raw(), inputs))


def remax(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """`G_t - R_greedy` with undiscounted G. R_greedy is the reward of the greedy sample, which is not trained. A group
    whose greedy sample has no R gets 0."""
    if inputs.is_greedy is None:
        raise ValueError("advantage remax needs is_greedy: sample each prompt once with temperature 0")
    greedy = inputs.is_greedy.bool()
    groups = _Groups.of(inputs)
    num_greedy = groups.sum(greedy.to(groups.rewards.dtype))
    if bool((num_greedy != 1).any()):
        bad = sorted(set(inputs.group_ids[num_greedy != 1].tolist()))
        raise ValueError(f"advantage remax needs exactly one greedy sample in each group; groups {bad[:8]} differ")
    loss_mask = inputs.mask.bool() & ~greedy[inputs.sequence_ids]
    returns = reverse_scan_masked(inputs.token_rewards, 1.0, inputs.mask, inputs.sequence_ids)
    baselines = groups.sum(apply_mask(groups.rewards, greedy))
    has_baseline = groups.sum((greedy & groups.is_member).to(groups.rewards.dtype)) > 0
    compared = loss_mask & has_baseline[inputs.sequence_ids]
    advantages = apply_mask(returns - baselines[inputs.sequence_ids], compared)
    return AdvantageOutputs(advantages, loss_mask, apply_mask(returns, loss_mask))


_ESTIMATORS: tuple[AdvantageFunction, ...] = (
    gae, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo, remax, opo, grpo_passk, gpg, gdpo
)  # fmt: skip
ADVANTAGES = {each.__name__: each for each in _ESTIMATORS}


def compute_advantages(inputs: AdvantageInputs, config: AdvantageConfig) -> AdvantageOutputs:
    """Apply the estimator `config.name`, without gradients. Raises ConfigError for an unusable result of a user's."""
    with torch.no_grad():
        outputs = find_function("advantage", config.name, ADVANTAGES)(inputs, config)
        if isinstance(outputs, Tensor) and outputs.shape == inputs.mask.shape:
            outputs = _outputs(inputs, apply_mask(outputs, inputs.mask))
    if not isinstance(outputs, AdvantageOutputs) or outputs.advantages.shape != inputs.mask.shape:
        raise ConfigError(
            f"advantage {config.name} must return a tensor with one advantage per token, or AdvantageOutputs"
        )
    return outputs


def place_on_last_token(sequence_rewards: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """From [S] to [T]: each sequence's reward at its last trained token, 0 elsewhere. Without one it is dropped."""
    trained = mask.bool().nonzero().squeeze(1)
    ids = sequence_ids[trained]
    is_last = torch.ones_like(ids, dtype=torch.bool)
    is_last[:-1] = ids[1:] != ids[:-1]
    token_rewards = sequence_rewards.new_zeros(sequence_ids.shape[0])
    token_rewards[trained[is_last]] = sequence_rewards[ids[is_last]]
    return token_rewards


def overlong_penalty(num_response_tokens: Tensor, config: OverlongConfig) -> Tensor:
    """[S] `min(-(len - (max - buffer)) / buffer * factor, 0)`. Add it to the sequence's reward."""
    start = config.max_num_tokens - config.buffer_num_tokens
    excess = (num_response_tokens - start).to(torch.get_default_dtype()) / config.buffer_num_tokens
    return (-excess * config.factor).clamp(max=0)
