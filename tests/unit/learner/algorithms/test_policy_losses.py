"""Policy and value losses and their gradients equal numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.config.algorithms import LossConfig, ValueLossConfig
from penstock_learner.algorithms.losses import LOSSES, LossInputs, LossOutputs, policy_loss, value_loss


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def evaluate(
    config: LossConfig,
    advantages: list[float],
    ratios: list[float],
    log_probs: list[float] | None = None,
    sequence_ids: list[int] | None = None,
) -> tuple[LossOutputs, list[float]]:
    """Loss and gradient of tokens that are `ratios` times as probable as under the proximal and behaviour policy."""
    current = tensor([-1.0] * len(ratios) if log_probs is None else log_probs).requires_grad_()
    base = (current - tensor(ratios).log()).detach()
    ids = torch.zeros(len(ratios), dtype=torch.int64) if sequence_ids is None else torch.tensor(sequence_ids)
    inputs = LossInputs(current, base, tensor(advantages), torch.ones(len(ratios)), ids, base)
    outputs = policy_loss(inputs, config)
    outputs.per_token.sum().backward()
    assert current.grad is not None
    return outputs, current.grad.tolist()


def near(expected: list[float]) -> object:
    return pytest.approx(expected, abs=1e-9)


def test_ppo_clips_each_side_only_where_it_would_gain() -> None:
    outputs, gradient = evaluate(LossConfig(), [1, 1, -1, -1, -1, 2], [1.5, 0.5, 0.5, 1.5, 5.0, 1.1])
    assert outputs.per_token.tolist() == near([-1.2, -0.5, 0.8, 1.5, 3.0, -2.2])
    assert gradient == near([0, -0.5, 0, 1.5, 0, -2.2])
    statistics = outputs.statistics
    assert statistics.mean_of(statistics.num_clipped_high) == pytest.approx(1 / 6)
    assert statistics.mean_of(statistics.num_clipped_low) == pytest.approx(1 / 6)
    assert statistics.mean_of(statistics.num_dual_clipped) == pytest.approx(1 / 6)
    assert statistics.mean_of(statistics.sum_negative_log_ratio) == pytest.approx(
        -math.log(1.5 * 0.5 * 0.5 * 1.5 * 5.0 * 1.1) / 6
    )


def test_ppo_clip_higher_and_without_dual_clip() -> None:
    outputs, _ = evaluate(LossConfig(clip_high=0.28, dual_clip=None), [1, -1, -1], [1.5, 5.0, 0.5])
    assert outputs.per_token.tolist() == near([-1.28, 5.0, 0.8])
    assert outputs.statistics.mean_of(outputs.statistics.num_dual_clipped) == 0


def test_the_ratio_is_bounded_before_it_is_exponentiated() -> None:
    current = tensor([100.0, -1000.0, -math.inf]).requires_grad_()
    zeros = torch.zeros(3, dtype=torch.int64)
    inputs = LossInputs(current, tensor([0.0, 0.0, 0.0]), tensor([-1.0, 1.0, 1.0]), torch.ones(3), zeros)
    loss = policy_loss(inputs, LossConfig(dual_clip=None)).per_token
    loss.sum().backward()
    assert loss[0].item() == pytest.approx(math.exp(20))
    assert loss[1:].tolist() == pytest.approx([-math.exp(-20)] * 2)
    assert current.grad is not None
    assert current.grad.tolist() == [0, 0, 0]


def test_gspo_has_the_sequence_as_value_and_the_token_as_gradient() -> None:
    ratios = [math.exp(0.1), math.exp(0.3), math.exp(-0.5)]
    config = LossConfig(name="gspo", clip_low=0.5, clip_high=0.5)
    outputs, gradient = evaluate(config, [1, 3, -2], ratios, sequence_ids=[0, 0, 1])
    s, other = 1.2214027581601699, 0.6065306597126334
    assert outputs.per_token.tolist() == near([-s, -3 * s, 2 * other])
    assert gradient == near([-s, -3 * s, 2 * other])


def test_gspo_default_clip_is_tight_and_has_no_dual_clip() -> None:
    outputs, gradient = evaluate(
        LossConfig(name="gspo"), [1, -1, 1, -1, -1], [1.2, 1.2, 0.8, 0.8, math.exp(15)], sequence_ids=[0, 1, 2, 3, 4]
    )
    assert outputs.per_token.tolist() == near([-1.0004, 1.2, -0.8, 0.9997, math.exp(10)])
    assert gradient == near([0, 1.2, -0.8, 0, 0])
    assert outputs.statistics.mean_of(outputs.statistics.num_clipped_high) == pytest.approx(0.2)
    assert outputs.statistics.mean_of(outputs.statistics.num_clipped_low) == pytest.approx(0.2)


def test_gspo_mean_is_over_trained_tokens() -> None:
    current = tensor([-1.0, -5.0, -1.0])
    old = tensor([-1.1, 7.0, -1.3])
    inputs = LossInputs(current, old, torch.ones(3), torch.tensor([1, 0, 1]), torch.zeros(3, dtype=torch.int64))
    loss = policy_loss(inputs, LossConfig(name="gspo", clip_high=0.5)).per_token
    assert loss.tolist() == near([-math.exp(0.2), 0, -math.exp(0.2)])


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    outputs, gradient = evaluate(LossConfig(name="cispo"), [2, -1, 1], [1.5, 0.5, 1.1], log_probs=[-1, -2, -3])
    assert outputs.per_token.tolist() == near([-1.2 * 2 * -1, -0.8 * -1 * -2, -1.1 * 1 * -3])
    assert gradient == near([-2.4, 0.8, -1.1])
    assert outputs.statistics.mean_of(outputs.statistics.num_clipped_low) == pytest.approx(1 / 3)
    assert outputs.statistics.mean_of(outputs.statistics.num_clipped_high) == pytest.approx(1 / 3)


def test_reinforce_truncates_the_weight_and_keeps_the_gradient() -> None:
    outputs, gradient = evaluate(LossConfig(name="reinforce"), [1.5, -1], [3.0, 0.5], log_probs=[-0.5, -2])
    assert outputs.per_token.tolist() == near([-2 * 1.5 * -0.5, -0.5 * -1 * -2])
    assert gradient == near([-3, 0.5])
    assert outputs.statistics.mean_of(outputs.statistics.num_clipped_high) == pytest.approx(0.5)


def test_reinforce_weighs_by_behaviour_and_not_by_the_proximal_policy() -> None:
    ids, ones = torch.zeros(1, dtype=torch.int64), torch.ones(1)
    inputs = LossInputs(tensor([-1.0]), tensor([-9.0]), tensor([1.0]), ones, ids, tensor([-1.0]))
    assert policy_loss(inputs, LossConfig(name="reinforce")).per_token.tolist() == [1.0]
    without = LossInputs(tensor([-1.0]), tensor([-9.0]), tensor([1.0]), ones, ids)
    with pytest.raises(ValueError, match="behaviour_log_probs"):
        policy_loss(without, LossConfig(name="reinforce"))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_tokens_reach_neither_loss_nor_gradient(name: str, garbage: float) -> None:
    def run(filler: float) -> tuple[list[float], list[float], float]:
        current = tensor([-1.0, filler, -2.0, -0.5, filler]).requires_grad_()
        old, behaviour = tensor([-1.1, filler, -1.5, -0.6, 0.0]), tensor([-1.2, 0.0, -2.5, -0.4, filler])
        advantages, mask = tensor([1.0, filler, -1.0, 2.0, filler]), torch.tensor([1, 0, 1, 1, 0])
        inputs = LossInputs(current, old, advantages, mask, torch.tensor([0, 0, 0, 1, 1]), behaviour)
        outputs = policy_loss(inputs, LossConfig(name=name, dro_beta=0.5))
        outputs.per_token.sum().backward()
        assert current.grad is not None
        statistics = outputs.statistics
        mean = statistics.mean_of(statistics.sum_negative_log_ratio)
        return outputs.per_token.tolist(), current.grad.tolist(), mean

    clean_loss, clean_gradient, clean_kl = run(0.0)
    loss, gradient, kl = run(garbage)
    assert loss == clean_loss
    assert gradient == clean_gradient
    assert kl == clean_kl
    assert (loss[1], loss[4], gradient[1], gradient[4]) == (0, 0, 0, 0)
    assert all(gradient[t] != 0 for t in (2, 3)) or name in ("ppo", "gspo", "geo_mean", "clip_cov")


def test_statistics_of_parts_add_up() -> None:
    whole, _ = evaluate(LossConfig(), [1, 1, -1, -1], [1.5, 0.5, 0.5, 5.0])
    first, _ = evaluate(LossConfig(), [1], [1.5])
    rest, _ = evaluate(LossConfig(), [1, -1, -1], [0.5, 0.5, 5.0])
    total = first.statistics + rest.statistics
    assert total.num_tokens == whole.statistics.num_tokens
    assert total.mean_of(total.num_clipped_high) == whole.statistics.mean_of(whole.statistics.num_clipped_high) == 0.25
    assert total.mean_of(total.sum_negative_log_ratio) == pytest.approx(
        whole.statistics.mean_of(whole.statistics.sum_negative_log_ratio)
    )


def test_value_loss_takes_the_larger_of_the_two_errors() -> None:
    values = tensor([1.0, 3.0, 0.0, math.nan]).requires_grad_()
    old = tensor([0.8, 1.0, 1.0, math.nan])
    returns = tensor([2.0, 1.0, 0.0, math.inf])
    per_token, num_clipped = value_loss(values, old, returns, torch.tensor([1, 1, 1, 0]), ValueLossConfig())
    per_token.sum().backward()
    assert per_token.tolist() == near([0.5 * 1.0**2, 0.5 * 2.0**2, 0.5 * 0.5**2, 0])
    assert num_clipped.item() == 1
    assert values.grad is not None
    assert values.grad.tolist() == near([-1.0, 2.0, 0, 0])
