"""The stages that steps are made of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.config.algorithms import AlgorithmConfig, LossConfig, ValueLossConfig
from penstock.config.learner import RewardModelConfig
from penstock_learner.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    overlong_penalty,
    place_on_last_token,
)
from penstock_learner.algorithms.aggregation import Denominators, apply_mask, segment_sum
from penstock_learner.algorithms.losses import kl_penalty, penalize_rewards
from penstock_learner.batches.partition import unpermute
from penstock_learner.batches.sequence_batch import REWARD_PART, SequenceBatch, token_ranges
from penstock_learner.steps.roles import BatchContext, Role, Roles, StepContext, Update, gather_fields
from penstock_learner.steps.step_result import listed

logger = logging.getLogger(__name__)


def with_advantages(batch: SequenceBatch, config: AlgorithmConfig, kl_coefficient: float) -> SequenceBatch:
    """The batch with `advantages`, the estimator's loss mask, and `returns` if the estimator computes them."""
    mask = torch.as_tensor(batch.loss_mask).bool()
    sequence_ids = torch.as_tensor(batch.sequence_ids)
    if batch.is_baseline is not None and not config.advantage.has_baseline:
        # Another config left greedy samples in the groups. Without a trained token they are not members of them.
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


async def ahead(batch: SequenceBatch, roles: Roles, context: BatchContext) -> SequenceBatch:
    """Both run at the same time. A role that the run does not have is skipped."""
    scored_by = context.config.reward_model
    computed = await gather_fields(
        rewards=combined_rewards(batch, roles.reward_model, context, scored_by) if scored_by is not None else None,
        reference_log_probs=roles.reference.log_probs(batch) if "reference" in roles else None,
    )
    rewards = computed.pop("rewards", batch.rewards)
    if batch.token_rewards is not None and scored_by is not None and scored_by.combine == "replace":
        replaced = np.isin(batch.sequence_ids, scored_sequences(context, scored_by))
        computed["token_rewards"] = np.where(replaced, 0, batch.token_rewards)
    return batch.with_sequence_fields(rewards=rewards).with_token_fields(**computed)


def scored_sequences(context: BatchContext, config: RewardModelConfig) -> list[int]:
    return [i for i, source in enumerate(context.data_sources) if config.scores_source(source)]


def combined(
    rewards: NDArray[np.float32], scores: NDArray[np.float32], config: RewardModelConfig
) -> NDArray[np.float32]:
    """[S] rewards of the rollout servers, combined with the reward model's scores of the same sequences."""
    return (rewards if config.combine == "add" else np.zeros_like(rewards)) + np.float32(config.coefficient) * scores


async def combined_rewards(
    batch: SequenceBatch, reward_model: Role, context: BatchContext, config: RewardModelConfig
) -> NDArray[np.float32]:
    """[S] the batch's rewards, combined with the reward model's for the data sources that it scores."""
    scored = scored_sequences(context, config)
    rewards = batch.rewards.copy()
    if scored:
        rewards[scored] = combined(rewards[scored], await reward_model.scores(batch.select(scored)), config)
        if bad := sorted({int(batch.group_ids[i]) for i in scored if not np.isfinite(rewards[i])}):
            logger.error(
                "the reward model's scores of prompts %s are not finite, so the step will be skipped; check "
                "learner.reward_model.path", listed(bad),
            )  # fmt: skip
    return rewards


async def log_probs_before(policy: Role, batch: SequenceBatch, context: StepContext) -> NDArray[np.float32]:
    """[T] the log-probs of the policy from before the step, NaN for the sequences of the first update, which computes
    its own."""
    own = context.first_update(batch)
    if not len(own):
        computed: NDArray[np.float32] = await policy.log_probs(batch)
        return computed
    others = np.setdiff1d(np.arange(batch.num_sequences), own)
    found = np.full(int(batch.response_lengths.sum()), np.nan, dtype=np.float32)
    if len(others):
        found[_tokens_of(batch, others)] = await policy.log_probs(batch.select(others.tolist()))
    return found


def with_own_log_probs(batch: SequenceBatch, updates: Sequence[Update], context: StepContext) -> SequenceBatch:
    """The batch with the log-probs that its first update has computed, in place of NaN."""
    own = context.first_update(batch)
    if not len(own) or batch.old_log_probs is None:
        return batch
    found, first = batch.old_log_probs.copy(), updates[0]
    found[_tokens_of(batch, own)] = unpermute([report.proximal for report in first.reports], first.shards, first.batch)
    return replace(batch, old_log_probs=found)


def _tokens_of(batch: SequenceBatch, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    lengths = batch.response_lengths
    return token_ranges((np.cumsum(lengths) - lengths)[sequences], lengths[sequences])


async def update_policy(policy: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of the policy for each part, one after another. The parts need `advantages`, `old_log_probs`
    if the correction recomputes them and there is more than one update, and `reference_log_probs` if the KL penalty is
    in the loss. The first part may lack `old_log_probs`, or have NaN."""
    _require("advantages", parts)
    if context.algorithm.correction.recomputes:
        _require("old_log_probs", parts[1:])
    given = parts[0].old_log_probs
    if given is not None and np.isnan(given).any():
        parts = [replace(parts[0], old_log_probs=None), *parts[1:]]
    if context.algorithm.kl.in_loss:
        _require("reference_log_probs", parts)
    loss = context.algorithm.loss
    settings = (context.step, context.version, context.kl_coefficient)
    return [await policy.update(part, denominators_of(part, loss), *settings) for part in parts]


async def update_critic(critic: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of a critic for each part, one after another. The parts need `values` and `returns`."""
    _require("values", parts)
    _require("returns", parts)
    loss = context.algorithm.value_loss
    return [await critic.update(part, denominators_of(part, loss), context.step) for part in parts]


def proximal_log_probs(batch: SequenceBatch, updates: Sequence[Update]) -> NDArray[np.float32] | None:
    """[T] the policy's log-probs of the batch before its updates: those of the batch, or those that its only update
    has computed. None if no pass gave them for every token."""
    if batch.old_log_probs is not None:
        return batch.old_log_probs
    of_policy = [update for update in updates if update.role == "policy"]
    if len(of_policy) != 1 or not of_policy[0].is_of(batch):
        return None
    (update,) = of_policy
    parts = [report.proximal for report in update.reports]
    return None if any(part is None for part in parts) else unpermute(parts, update.shards, batch)


def _require(name: str, parts: Sequence[SequenceBatch]) -> None:
    """Raise ValueError, which lists the fields that there are, if a part lacks this one."""
    for part in parts:
        part[name]
