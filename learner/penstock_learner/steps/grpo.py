"""GRPO and every other algorithm without a critic.

    a step ahead: scores, reference log-probs ┐
    proximal log-probs                        ┴─► advantages ─► policy updates

A policy with an adapter is its own reference: it computes the reference's log-probs in the step.
"""

from __future__ import annotations

from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.actors.role_group import gather_all
from penstock_learner.steps.advantages import with_advantages
from penstock_learner.steps.context import StepContext
from penstock_learner.steps.roles import Roles, gather_fields
from penstock_learner.steps.updates import log_probs_before, update_policy, with_own_log_probs


async def step(batch: SequenceBatch, roles: Roles, context: StepContext) -> tuple[SequenceBatch, dict[str, float]]:
    """Train the policy on the batch."""
    policy = roles.policy
    forwards = gather_fields(
        old_log_probs=log_probs_before(policy, batch, context) if context.recomputes_log_probs else None,
        reference_log_probs=policy.reference_log_probs(batch) if context.config.policy_is_reference else None,
    )
    batch, computed = await gather_all(context.ahead(), forwards)
    batch = batch.with_token_fields(**computed)
    batch = with_advantages(batch, context.algorithm, context.kl_coefficient)
    updates = await update_policy(policy, context.minibatches(batch), context)
    return with_own_log_probs(batch, updates, context), {}
