"""Calls a user's advantage and loss with a few tokens, so that a mistake in them is found before a run starts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.config.algorithms import ADVANTAGE_NAMES, LOSS_NAMES, AlgorithmConfig
from penstock.errors import ConfigError, PenstockError
from penstock_learner.algorithms.advantages import AdvantageInputs, compute_advantages
from penstock_learner.algorithms.losses import LossInputs, policy_loss


def try_functions(algorithm: AlgorithmConfig, *, has_critic: bool) -> None:
    """Raise ConfigError if the advantage or the loss cannot be imported, raises, or returns something of another
    shape."""
    mask = torch.tensor([1, 0, 1] * 4)
    sequence_ids = torch.arange(4).repeat_interleave(3)
    rewards = torch.tensor([0.0, 0, 1] * 2 + [0.0] * 6)
    values = torch.linspace(0, 1, 12) if has_critic else None
    is_greedy = torch.tensor([True, False] * 2) if algorithm.advantage.has_baseline else None
    inputs = AdvantageInputs(rewards, mask, sequence_ids, torch.tensor([7, 7, 9, 9]), values, is_greedy)
    log_probs = torch.linspace(-1, 0, 12, requires_grad=True)
    old = torch.full((12,), -0.5)
    losses = LossInputs(log_probs, old, rewards, mask, sequence_ids, old)
    if algorithm.advantage.name not in ADVANTAGE_NAMES:
        _try("advantage", algorithm.advantage.name, lambda: compute_advantages(inputs, algorithm.advantage))
    if algorithm.loss.name not in LOSS_NAMES:
        _try("loss", algorithm.loss.name, lambda: policy_loss(losses, algorithm.loss).per_token.sum().backward())


def _try(kind: str, name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except PenstockError:
        raise
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            f"learner.algorithm.{kind}.name: {name} fails on a small batch: {type(error).__name__}: {message}"
        ) from error
