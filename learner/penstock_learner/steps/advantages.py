"""Computes advantages from rewards, on the whole batch, before it is split over ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.algorithms import AlgorithmConfig, LossConfig, ValueLossConfig
from penstock_learner.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    overlong_penalty,
    place_on_last_token,
)
from penstock_learner.algorithms.aggregation import Denominators, apply_mask, segment_sum
from penstock_learner.algorithms.kl import kl_penalty, penalize_rewards
from penstock_learner.batches.sequence_batch import REWARD_PART, SequenceBatch


def with_advantages(batch: SequenceBatch, config: AlgorithmConfig, kl_coefficient: float) -> SequenceBatch:
    """The batch with `advantages`, the estimator's loss mask, and `returns` if the estimator computes them."""
    mask = torch.as_tensor(batch.loss_mask).bool()
    sequence_ids = torch.as_tensor(batch.sequence_ids)
    if batch.is_baseline is not None and not config.advantage.has_baseline:
        # Another config left greedy samples in the groups. Without a trained token they are no members of them.
        mask = mask & ~torch.as_tensor(batch.is_baseline)[sequence_ids]
    rewards = torch.as_tensor(batch.rewards)
    if config.overlong is not None:
        rewards = rewards + overlong_penalty(torch.as_tensor(batch.response_lengths), config.overlong)
    token_rewards = place_rewards(rewards, batch.token_rewards, mask, sequence_ids)
    if config.kl.in_reward:
        current = batch.behaviour_log_probs if batch.old_log_probs is None else batch.old_log_probs
        assert batch.reference_log_probs is not None
        reference = torch.as_tensor(batch.reference_log_probs)
        penalized = mask
        if batch.is_baseline is not None:
            # A greedy sample is not drawn from the policy, so its log-probs do not estimate a KL: its reward stays.
            penalized = mask & ~torch.as_tensor(batch.is_baseline)[sequence_ids]
        penalty = kl_penalty(torch.as_tensor(current), reference, penalized, config.kl.penalty)
        token_rewards = penalize_rewards(token_rewards, penalty, kl_coefficient)
    inputs = AdvantageInputs(
        token_rewards,
        mask,
        sequence_ids,
        torch.as_tensor(batch.group_ids),
        values=None if batch.values is None else torch.as_tensor(batch.values).to(token_rewards.dtype),
        is_greedy=None if batch.is_baseline is None else torch.as_tensor(batch.is_baseline),
        reward_parts={key: torch.as_tensor(batch[REWARD_PART + key]) for key in config.advantage.reward_keys},
        episodes=None if batch.episodes is None else torch.as_tensor(batch.episodes),
    )
    outputs = compute_advantages(inputs, config.advantage)
    return replace(
        batch,
        advantages=outputs.advantages.numpy().astype(np.float32),
        loss_mask=outputs.loss_mask.numpy().astype(np.uint8),
        returns=None if outputs.returns is None else outputs.returns.numpy().astype(np.float32),
    )


def place_rewards(
    rewards: torch.Tensor, of_tokens: NDArray[np.float32] | None, mask: torch.Tensor, sequence_ids: torch.Tensor
) -> torch.Tensor:
    """[T] the rewards of the tokens that have their own. The rest of each sequence's reward is at its last trained
    token, so that the sum over a sequence is its reward."""
    if of_tokens is None:
        return place_on_last_token(rewards, mask, sequence_ids)
    own = apply_mask(torch.as_tensor(of_tokens), mask).double()  # equal rewards stay equal in the sum
    rest = rewards - segment_sum(own, sequence_ids, rewards.shape[0])
    return own + place_on_last_token(rest, mask, sequence_ids)


def denominators_of(batch: SequenceBatch, loss: LossConfig | ValueLossConfig) -> Denominators:
    """The counts that the loss of the whole batch is divided by, on every rank, if the loss is this one."""
    mask, sequence_ids = torch.as_tensor(batch.loss_mask), torch.as_tensor(batch.sequence_ids)
    return Denominators.of(mask, sequence_ids, loss.constant_length)
