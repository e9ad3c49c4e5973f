"""The placement of rewards, and DAPO's length penalty."""

from __future__ import annotations

import pytest
import torch

from penstock.config.algorithms import OverlongConfig
from penstock_learner.algorithms.advantages import overlong_penalty, place_on_last_token


def test_a_reward_goes_to_the_last_trained_token() -> None:
    mask, ids = torch.tensor([1, 1, 0, 0, 1, 0]), torch.tensor([0, 0, 0, 1, 2, 2])
    rewards = place_on_last_token(torch.tensor([5.0, 6.0, 7.0]), mask, ids)
    assert rewards.tolist() == [0, 5, 0, 0, 7, 0]


def test_overlong_penalty_grows_over_the_buffer() -> None:
    config = OverlongConfig(max_num_tokens=10, buffer_num_tokens=4, factor=2.0)
    penalty = overlong_penalty(torch.tensor([1, 6, 7, 8, 10]), config)
    assert penalty.tolist() == pytest.approx([0, 0, -0.5, -1.0, -2.0])
