"""KL penalties and controllers equal numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from penstock.config.algorithms import KLConfig, PenaltyName
from penstock_learner.algorithms.losses import kl_penalty, penalize_rewards
from penstock_learner.term import make_kl_controller


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "expected", "gradient"),
    [
        ("k1", [0.5, -0.5], [1.0, 1.0]),
        ("abs", [0.5, 0.5], [1.0, -1.0]),
        ("k2", [0.125, 0.125], [0.5, -0.5]),
        ("k3", [0.1065306597, 0.1487212707], [0.3934693403, -0.6487212707]),
    ],
)
def test_penalties_and_gradients_by_hand(name: PenaltyName, expected: list[float], gradient: list[float]) -> None:
    log_probs, ref = tensor([-1.0, -2.0, math.nan]).requires_grad_(), tensor([-1.5, -1.5, math.inf])
    kl = kl_penalty(log_probs, ref, torch.tensor([1, 1, 0]), name)
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([*expected, 0], abs=1e-9)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([*gradient, 0], abs=1e-9)


def test_k3_is_bounded() -> None:
    log_probs, ref = tensor([-1000.0, 0.0, -2.0]), tensor([0.0, -1000.0, 0.0])
    expected = [10.0, 10.0, math.exp(2) - 3]
    assert kl_penalty(log_probs, ref, torch.ones(3), "k3").tolist() == pytest.approx(expected)


def test_penalty_in_the_reward() -> None:
    kl = tensor([0.5, 0.0, -1.0]).requires_grad_()
    rewards = penalize_rewards(tensor([0.0, 0.0, 1.0]), kl, 0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0.0, 1.1])
    assert not rewards.requires_grad


@pytest.mark.parametrize(
    ("measured_kl", "expected"),
    [(0.2, 1e-3 * 1.02), (0.105, 1e-3 * 1.005), (0.1, 1e-3), (0.0, 1e-3 * 0.98)],
)
def test_adaptive_controller(measured_kl: float, expected: float) -> None:
    controller = make_kl_controller(KLConfig(controller="adaptive"))
    assert controller.updated(measured_kl, num_sequences=1000).coefficient == pytest.approx(expected, rel=1e-12)
    assert controller.coefficient == 1e-3


@pytest.mark.parametrize("measured_kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_does_not_reach_the_coefficient(measured_kl: float) -> None:
    controller = make_kl_controller(KLConfig(controller="adaptive"))
    assert controller.updated(measured_kl, num_sequences=1000).coefficient == 1e-3


def test_adaptive_controller_resumes_where_it_was() -> None:
    resumed = make_kl_controller(KLConfig(controller="adaptive"), coefficient=0.5)
    assert resumed.updated(1.0, num_sequences=10000).coefficient == pytest.approx(0.6)


def test_fixed_controller_stays() -> None:
    assert make_kl_controller(KLConfig(coefficient=0.2)).updated(9.0, num_sequences=100).coefficient == 0.2
