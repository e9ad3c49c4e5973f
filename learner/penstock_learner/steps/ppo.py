"""PPO with a critic.

    a step ahead: scores, reference log-probs ┐                 ┌► policy updates
    proximal log-probs                        ├─► advantages ─► ┤
    values                                    ┘                 └► critic updates

The entries of a column run at the same time.
"""

from __future__ import annotations

from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.actors.role_group import gather_all
from penstock_learner.steps.advantages import with_advantages
from penstock_learner.steps.context import StepContext
from penstock_learner.steps.roles import Roles, gather_fields
from penstock_learner.steps.updates import log_probs_before, update_critic, update_policy, with_own_log_probs


async def step(batch: SequenceBatch, roles: Roles, context: StepContext) -> tuple[SequenceBatch, dict[str, float]]:
    """Train the policy and the critic on the batch, at the same time."""
    policy, critic = roles.policy, roles.critic
    forwards = gather_fields(
        old_log_probs=log_probs_before(policy, batch, context) if context.recomputes_log_probs else None,
        reference_log_probs=policy.reference_log_probs(batch) if context.config.policy_is_reference else None,
        values=critic.values(batch),
    )
    batch, computed = await gather_all(context.ahead(), forwards)
    batch = batch.with_token_fields(**computed)
    batch = with_advantages(batch, context.algorithm, context.kl_coefficient)
    parts = context.minibatches(batch)
    updates, _ = await gather_all(update_policy(policy, parts, context), update_critic(critic, parts, context))
    return with_own_log_probs(batch, updates, context), {}
