"""What the frozen roles compute a step ahead: the reward model's scores and the reference's log-probs."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from penstock.config.learner import RewardModelConfig
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.steps.context import BatchContext
from penstock_learner.steps.roles import Role, Roles, gather_fields
from penstock_learner.steps.skipped_updates import listed

logger = logging.getLogger(__name__)


async def ahead(batch: SequenceBatch, roles: Roles, context: BatchContext) -> SequenceBatch:
    """Both run at the same time. A role that the run does not have is left out."""
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
    """The sequences of the data sources that the reward model scores."""
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
