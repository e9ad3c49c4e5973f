"""Every estimator, loss and correction equals its formula on padded [sequences, tokens] blocks.

The formulas are written as in other trainers: loops over tokens and groups, without code of the packed functions.
Inputs are random, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.config.algorithms import (
    AdvantageConfig,
    Aggregation,
    CorrectionConfig,
    LossConfig,
    PenaltyName,
    ValueLossConfig,
    WeightName,
)
from penstock_learner.algorithms.advantages import ADVANTAGES, AdvantageInputs, compute_advantages
from penstock_learner.algorithms.aggregation import Denominators, aggregate
from penstock_learner.algorithms.losses import (
    LOSSES,
    LossInputs,
    correct,
    kl_penalty,
    policy_loss,
    value_loss,
)

NUM_SEQUENCES, WIDTH = 8, 9
GROUPS = torch.tensor([3, 3, 3, 5, 5, 9, 9, 1])
GAMMA, LAM = 0.97, 0.9
SEEDS = st.integers(0, 2**31)


class Block:
    """Padded sequences with some tokens masked out. The last token of each is trained. `flat` packs their tokens."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, WIDTH + 1, (NUM_SEQUENCES,), generator=self.generator)
        self.is_token = torch.arange(WIDTH) < lengths[:, None]
        holes = torch.rand(NUM_SEQUENCES, WIDTH, generator=self.generator) < 0.25
        self.mask = (self.is_token & ~holes).double()
        self.mask[torch.arange(NUM_SEQUENCES), lengths - 1] = 1
        self.group_ids = GROUPS[torch.randperm(NUM_SEQUENCES, generator=self.generator)]
        self.sequence_ids = self.flat(torch.arange(NUM_SEQUENCES)[:, None].expand(NUM_SEQUENCES, WIDTH))

    def normal(self, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(NUM_SEQUENCES, WIDTH, generator=self.generator, dtype=torch.float64)

    def flat(self, block: Tensor) -> Tensor:
        return block[self.is_token]

    def whitened(self, block: Tensor) -> Tensor:
        trained = block[self.mask.bool()]
        return (block - trained.mean()) * torch.rsqrt(trained.var() + 1e-8) * self.mask

    def by_group(self, of: Callable[[Tensor], Tensor]) -> Tensor:
        """[S] a number for each sequence, computed from the indices of its group's members."""
        return torch.stack([of((self.group_ids == group).nonzero().squeeze(1)) for group in self.group_ids])


def close(packed: Tensor, block: Tensor, of: Block) -> None:
    torch.testing.assert_close(packed.double(), of.flat(block).double(), atol=1e-9, rtol=1e-9)


def advantage_by_formula(name: str, of: Block, rewards: Tensor, values: Tensor, is_greedy: Tensor) -> Tensor:
    mask, zeros = of.mask, torch.zeros(NUM_SEQUENCES, dtype=torch.float64)
    if name in ("gae", "reinforce_plus_plus", "remax"):
        following, carried, columns = zeros, zeros, []
        gamma, lam = (GAMMA, LAM) if name == "gae" else (GAMMA, 1.0) if name != "remax" else (1.0, 1.0)
        for t in reversed(range(WIDTH)):
            error = rewards[:, t] + (gamma * following - values[:, t] if name == "gae" else 0)
            carried = torch.where(mask[:, t] > 0, error + gamma * lam * carried, carried)
            following = torch.where(mask[:, t] > 0, values[:, t], following)
            columns.append(carried)
        scanned = torch.stack(columns[::-1], dim=1)
        if name != "remax":
            return of.whitened(scanned)
        greedy = of.by_group(lambda members: (rewards * mask).sum(1)[members][is_greedy[members]].sum())
        return (scanned - greedy[:, None]) * mask * ~is_greedy[:, None]
    totals, lengths = (rewards * mask).sum(1), mask.sum(1)
    sizes = of.by_group(lambda members: torch.tensor(float(len(members)), dtype=torch.float64))
    means = of.by_group(lambda members: totals[members].mean())
    if name == "rloo":
        return (sizes / (sizes - 1).clamp(min=1) * (totals - means))[:, None] * mask
    if name == "opo":
        weighed = of.by_group(lambda members: (lengths * totals)[members].sum() / lengths[members].sum())
        return (totals - weighed)[:, None] * mask
    centered = totals - means.where(sizes > 1, 0.0)
    if name == "gdpo":
        total = torch.zeros_like(mask)
        for number, weight in enumerate((2.0, -0.5)):
            for group in of.group_ids.unique():
                members = of.group_ids == group
                part = values[members, number]
                alone = len(part) == 1
                scaled = (part if alone else part - part.mean()) / ((1.0 if alone else part.std()) + 1e-6)
                total[members] += weight * scaled[:, None] * mask[members]
        return of.whitened(total)
    if name == "reinforce_plus_plus_baseline":
        return of.whitened(centered[:, None] * mask)
    if name == "gpg":
        return (NUM_SEQUENCES / (totals != 0).sum() * centered)[:, None] * mask
    stds = of.by_group(lambda members: totals[members].std() if len(members) > 1 else torch.ones(()).double())
    if name == "grpo_passk":
        second = of.by_group(lambda members: totals[members].sort().values[-2:][0])
        return ((totals - second).clamp(min=0) / (stds + 1e-6))[:, None] * mask
    return (centered / (stds + 1e-6))[:, None] * mask


@pytest.mark.parametrize("name", ADVANTAGES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_advantages(name: str, seed: int) -> None:
    block = Block(seed)
    rewards, values = block.normal() * block.mask, block.normal()
    groups = block.group_ids.tolist()
    is_greedy = torch.tensor([group not in groups[:i] for i, group in enumerate(groups)])
    flat = block.flat
    inputs = AdvantageInputs(
        flat(rewards), flat(block.mask), block.sequence_ids, block.group_ids, flat(values), is_greedy,
        {"right": values[:, 0], "short": values[:, 1]},
    )  # fmt: skip
    parts = {"reward_keys": ("right", "short"), "reward_weights": (2.0, -0.5)} if name == "gdpo" else {}
    outputs = compute_advantages(inputs, AdvantageConfig(name=name, gamma=GAMMA, lam=LAM, **parts))
    close(outputs.advantages, advantage_by_formula(name, block, rewards, values, is_greedy), block)


def loss_by_formula(name: str, of: Block, lp: Tensor, old: Tensor, behaviour: Tensor, advantages: Tensor) -> Tensor:
    def clipped(ratio: Tensor, low: float, high: float) -> Tensor:
        return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))

    ratio = (lp - old).clamp(-20, 20).exp()
    if name == "ppo":
        loss = clipped(ratio, 0.2, 0.28)
        return torch.where(advantages < 0, torch.minimum(loss, -1.5 * advantages), loss)
    if name == "gspo":
        of_sequence = ((lp - old) * of.mask).sum(1) / of.mask.sum(1)
        return clipped((lp - lp.detach() + of_sequence.detach()[:, None]).clamp(max=10).exp(), 0.2, 0.28)
    if name == "cispo":
        return -ratio.detach().clamp(0.8, 1.28) * advantages * lp
    if name == "gpg":
        return -advantages * lp
    if name in ("clip_cov", "kl_cov"):
        trained = of.mask.bool()
        mean_advantage, mean_lp = (each[trained].mean() for each in (advantages, lp.detach()))
        covariance = ((advantages - mean_advantage) * (lp.detach() - mean_lp)).masked_fill(~trained, -torch.inf)
        if name == "clip_cov":
            loss = clipped(ratio, 0.2, 0.28)
            free = ~((ratio < 0.8) & (advantages < 0)) & ~((ratio > 1.28) & (advantages > 0))
            return torch.where(free & (covariance > 0.1), 0.0, loss)
        largest = covariance >= covariance[trained].sort(descending=True).values[max(1, int(trained.sum() * 0.9)) - 1]
        return -advantages * ratio + torch.where(largest, 0.1 * (lp - old).abs(), 0.0)
    if name in ("dppo_tv", "dppo_kl"):
        p, q = lp.detach().exp(), old.exp()
        if name == "dppo_tv":
            kept = torch.where(advantages > 0, p - q <= 0.28, p - q >= -0.2)
        else:
            divergence = q * (old - lp.detach()) + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
            kept = torch.where(advantages > 0, (divergence <= 0.28) | (p <= q), (divergence <= 0.2) | (p >= q))
        return -ratio.detach().clamp(max=1.5) * advantages * lp * kept
    if name == "dro":
        return -advantages * lp + 0.7 / 2 * (lp - old) ** 2
    if name == "geo_mean":
        bounded = torch.where(advantages > 0, (lp - old).clamp(max=0.28), (lp - old).clamp(min=-0.2))
        mean, advantage = ((each * of.mask).sum(1) / of.mask.sum(1) for each in (bounded, advantages))
        return (-advantage * mean.exp())[:, None].expand_as(lp)
    if name == "sapo":
        tau = torch.where(advantages > 0, 1.0, 1.05).double()
        return -advantages * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    return -(lp - behaviour).clamp(-20, 20).exp().detach().clamp(max=2) * advantages * lp


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, distance=st.sampled_from([0.2, 2.0]))
def test_losses_and_their_gradients(name: str, seed: int, distance: float) -> None:
    block = Block(seed)
    old, advantages = -block.normal().abs(), block.normal()
    lp = (old + block.normal(distance)).clamp(max=-0.01).requires_grad_()
    behaviour = old + block.normal(0.4)
    expected = loss_by_formula(name, block, lp, old, behaviour, advantages) * block.mask
    (expected_gradient,) = torch.autograd.grad(expected.sum(), lp)
    packed = block.flat(lp).detach().requires_grad_()
    others = (block.flat(tensor) for tensor in (old, advantages, block.mask))
    inputs = LossInputs(packed, *others, block.sequence_ids, block.flat(behaviour))
    cov = {"cov_share": 1.0 if name == "clip_cov" else 0.9, "cov_low": 0.1, "cov_high": 1e9}
    config = LossConfig(name=name, clip_low=0.2, clip_high=0.28, dual_clip=1.5, dro_beta=0.7, **cov)
    outputs = policy_loss(inputs, config)
    (gradient,) = torch.autograd.grad(outputs.per_token.sum(), packed)
    close(outputs.per_token, expected, block)
    close(gradient, expected_gradient, block)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_aggregations_penalties_and_values(seed: int) -> None:
    block = Block(seed)
    mask, losses = block.mask, block.normal() * block.mask
    by_sequence = losses.sum(1)
    expected: dict[Aggregation, Tensor] = {
        "token-mean": losses.sum() / mask.sum(),
        "token-sum": losses.sum(),
        "seq-mean-token-sum": by_sequence.mean(),
        "seq-mean-token-mean": (by_sequence / mask.sum(1)).mean(),
        "seq-mean-token-sum-norm": by_sequence.mean() / 17,
    }
    assert set(expected) == set(get_args(Aggregation))
    denominators = Denominators.of(block.flat(mask), block.sequence_ids, 17)
    for mode, loss in expected.items():
        packed = aggregate(block.flat(losses), block.flat(mask), block.sequence_ids, mode, denominators)
        torch.testing.assert_close(packed, loss, atol=1e-12, rtol=1e-12)

    lp, ref = block.normal(), block.normal(2.0)
    d = lp - ref
    penalties: dict[Any, Tensor] = {"k1": d, "abs": d.abs(), "k2": d**2 / 2, "k3": ((-d).exp() + d - 1).clamp(max=10)}
    assert set(penalties) == set(get_args(PenaltyName))
    for name, penalty in penalties.items():
        close(kl_penalty(block.flat(lp), block.flat(ref), block.flat(mask), name), penalty * mask, block)

    old, new, returns = block.normal(), block.normal(), block.normal()
    near = torch.minimum(torch.maximum(new, old - 0.5), old + 0.5)
    squares = torch.maximum((new - returns) ** 2, (near - returns) ** 2) / 2
    inputs = [block.flat(tensor) for tensor in (new, old, returns, mask)]
    close(value_loss(*inputs, ValueLossConfig())[0], squares * mask, block)


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS)
def test_corrections(seed: int) -> None:
    block = Block(seed)
    mask, old = block.mask, block.normal()
    behaviour = old + block.normal(0.5)
    x = (old - behaviour) * mask
    ratio, of_sequence = x.exp(), x.sum(1).exp()[:, None].expand(NUM_SEQUENCES, WIDTH)
    weights: dict[WeightName, Tensor] = {
        "none": torch.ones_like(x),
        "token_truncation": ratio.clamp(max=2),
        "sequence_truncation": of_sequence.clamp(max=2),
        "band": torch.where((ratio >= 0.5) & (ratio <= 5), ratio, 0.0),
    }
    assert set(weights) == set(get_args(WeightName))
    inputs = [block.flat(tensor) for tensor in (old, behaviour, mask)]
    for name, expected in weights.items():
        found = correct(*inputs, block.sequence_ids, CorrectionConfig(weight=name))
        w = expected * mask
        close(found.weights, w, block)
        numbers = found.statistics
        assert numbers.mean_of(numbers.sum_weights) == pytest.approx(float(w.sum() / mask.sum()))
        assert float(numbers.max_weight) == pytest.approx(float(w.max()))
        effective = float(w.sum() ** 2 / (mask.sum() * (w**2).sum())) if w.any() else 0.0
        assert numbers.effective_sample_ratio == pytest.approx(effective)
        assert numbers.mean_of(numbers.sum_kl) == pytest.approx(float(((ratio - 1 - x) * mask).sum() / mask.sum()))
    for rejection, of_token in (("token", ratio), ("sequence", of_sequence)):
        kept = ((of_token >= 0.5) & (of_token <= 2)) * mask
        found = correct(*inputs, block.sequence_ids, CorrectionConfig(mode="none", rejection=rejection))
        close(found.kept, kept, block)
        numbers = found.statistics
        assert numbers.mean_of(numbers.num_rejected) == pytest.approx(1 - float(kept.sum() / mask.sum()))
