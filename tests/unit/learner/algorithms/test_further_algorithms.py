"""GPG, GMPO, SAPO and Pass@k against their published formulas, written plainly for one sequence or group at a time."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from penstock.config.algorithms import AdvantageConfig, LossConfig
from penstock_learner.algorithms.advantages import AdvantageInputs, compute_advantages
from penstock_learner.algorithms.losses import LossInputs, policy_loss

LENGTHS = (3, 1, 2)
LOG_RATIOS = ([0.5, -0.1, -0.6], [0.3], [-0.9, 0.1])
ADVANTAGES = ([2.0, 2.0, 2.0], [-1.5], [-0.5, -0.5])


def evaluate(config: LossConfig) -> tuple[list[list[float]], list[list[float]]]:
    """The losses and gradients of three sequences. A masked-out token with absurd numbers is in the second."""
    ratios = [*LOG_RATIOS[0], *LOG_RATIOS[1], 9.0, *LOG_RATIOS[2]]
    advantages = torch.tensor([*ADVANTAGES[0], *ADVANTAGES[1], 99.0, *ADVANTAGES[2]], dtype=torch.float64)
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1])
    current = torch.full((7,), -1.0, dtype=torch.float64, requires_grad=True)
    old = (current - torch.tensor(ratios, dtype=torch.float64)).detach()
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    losses = policy_loss(LossInputs(current, old, advantages, mask, ids), config).per_token
    losses.sum().backward()
    assert current.grad is not None and losses[4] == 0 and current.grad[4] == 0
    return by_sequence(losses[mask.bool()]), by_sequence(current.grad[mask.bool()])


def by_sequence(values: Tensor) -> list[list[float]]:
    ends = [0, 3, 4, 6]
    return [values[start:end].tolist() for start, end in pairwise(ends)]


def check(found: list[list[float]], expected: list[list[float]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def test_gpg_is_the_plain_policy_gradient() -> None:
    losses, gradients = evaluate(LossConfig(name="gpg"))
    check(losses, [list(advantages) for advantages in ADVANTAGES])  # -A lp with lp = -1
    check(gradients, [[-one for one in advantages] for advantages in ADVANTAGES])


def test_geo_mean_is_the_clipped_geometric_mean_of_a_sequence() -> None:
    config = LossConfig(name="geo_mean", clip_low=0.4, clip_high=0.2)
    losses, gradients = evaluate(config)
    expected, slopes = [], []
    for ratios, advantages in zip(LOG_RATIOS, ADVANTAGES, strict=True):
        positive = advantages[0] > 0
        clipped = [min(one, 0.2) if positive else max(one, -0.4) for one in ratios]
        value = -advantages[0] * math.exp(sum(clipped) / len(clipped))
        expected.append([value] * len(ratios))
        # Every token of the sequence has the same loss, and each free token moves all of them.
        slopes.append([value if one == bound else 0.0 for one, bound in zip(ratios, clipped, strict=True)])
    check(losses, expected)
    check(gradients, slopes)
    assert config.aggregation_mode == "seq-mean-token-mean"


def test_sapo_has_a_soft_gate_for_each_sign() -> None:
    losses, gradients = evaluate(LossConfig(name="sapo", tau_positive=2.0, tau_negative=3.0))
    expected, slopes = [], []
    for ratios, advantages in zip(LOG_RATIOS, ADVANTAGES, strict=True):
        tau = 2.0 if advantages[0] > 0 else 3.0
        gates = [1 / (1 + math.exp(-tau * (math.exp(one) - 1))) for one in ratios]
        expected.append([-advantages[0] * 4 / tau * gate for gate in gates])
        slopes.append([-advantages[0] * 4 * g * (1 - g) * math.exp(one) for g, one in zip(gates, ratios, strict=True)])
    check(losses, expected)
    check(gradients, slopes)
    on_policy = LossInputs(*(torch.zeros(1) for _ in range(2)), torch.ones(1), torch.ones(1), torch.zeros(1).long())
    assert float(policy_loss(on_policy, LossConfig(name="sapo")).per_token) == -2.0


def advantages_of(name: str, groups: list[list[float]], **settings: bool) -> list[list[float]]:
    """The advantages of samples with two tokens each, of which the first is masked out."""
    rewards = [reward for group in groups for reward in group]
    token_rewards = torch.tensor([part for reward in rewards for part in (7.0, reward)], dtype=torch.float64)
    ids = torch.arange(len(rewards)).repeat_interleave(2)
    group_ids = torch.tensor([5 - number for number, group in enumerate(groups) for _ in group])
    mask = torch.tensor([0, 1] * len(rewards))
    found = compute_advantages(
        AdvantageInputs(token_rewards, mask, ids, group_ids), AdvantageConfig(name=name, **settings)
    ).advantages
    assert not found[::2].any()
    values = iter(found[1::2].tolist())
    return [[next(values) for _ in group] for group in groups]


GROUPS = [[0.0, 3.0, 1.0], [2.0, 2.0], [4.0], [0.0, 0.0, 0.0]]


def test_passk_rewards_only_the_single_best_sample() -> None:
    plain = [[0.0, 2.0, 0.0], [0.0, 0.0], [0.0], [0.0, 0.0, 0.0]]
    check(advantages_of("grpo_passk", GROUPS, normalize_by_std=False), plain)
    mean = 4 / 3
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in GROUPS[0]) / 2)
    scaled = [[0.0, 2 / (deviation + 1e-6), 0.0], *plain[1:]]
    check(advantages_of("grpo_passk", GROUPS), scaled)
    check(advantages_of("grpo_passk", [[-2.0, -1.0]], normalize_by_std=False), [[0.0, 1.0]])


def test_gpg_scales_by_the_share_of_samples_with_a_reward() -> None:
    alpha = 9 / 5
    expected = [[alpha * -4 / 3, alpha * 5 / 3, alpha * -1 / 3], [0.0, 0.0], [alpha * 4.0], [0.0, 0.0, 0.0]]
    check(advantages_of("gpg", GROUPS), expected)
    check(advantages_of("gpg", [[0.0, 0.0]]), [[0.0, 0.0]])


def test_clip_cov_skips_a_share_of_the_tokens_with_a_large_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    lp = -torch.rand(1000, generator=generator, dtype=torch.float64) * 4
    advantages = torch.randn(1000, generator=generator, dtype=torch.float64) * 2
    ones, ids = torch.ones(1000), torch.zeros(1000, dtype=torch.long)
    inputs = LossInputs(lp, lp, advantages, ones, ids)
    covariance = (advantages - advantages.mean()) * (lp - lp.mean())
    may_go = (covariance > 1) & (covariance < 5)
    assert 100 < may_go.sum() < 900
    config = LossConfig(name="clip_cov", cov_share=0.02)
    first = policy_loss(inputs, config).per_token
    assert (first == 0).sum() == 20 and may_go[first == 0].all()
    assert torch.equal(first, policy_loss(inputs, config).per_token)
    other = policy_loss(LossInputs(lp + 0.01, lp + 0.01, advantages, ones, ids), config).per_token
    assert not torch.equal(first == 0, other == 0), "other log-probs draw other lots"
    assert (policy_loss(inputs, LossConfig(name="clip_cov")).per_token == 0).sum() == 1
    assert (policy_loss(inputs, LossConfig(name="clip_cov", cov_low=1e9, cov_high=2e9)).per_token != 0).all()


def test_kl_cov_penalises_the_token_with_the_largest_covariance() -> None:
    lp, advantages = torch.tensor([-1.0, -0.1, -3.0]), torch.tensor([0.0, 2.0, 1.0])
    inputs = LossInputs(lp, lp - 0.5, advantages, torch.ones(3), torch.zeros(3, dtype=torch.long))
    found = policy_loss(inputs, LossConfig(name="kl_cov", cov_kl_coefficient=0.3)).per_token
    expected = -advantages * math.exp(0.5) + torch.tensor([0.0, 0.15, 0.0])
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
