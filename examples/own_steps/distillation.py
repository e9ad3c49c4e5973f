"""On-policy distillation: the policy learns from a teacher's log-probs of the policy's own samples.

The advantage of a token is `log p_teacher - log p_policy`, so the policy loss lowers the reverse KL to the teacher.
Rewards are shown and not trained.
"""

import numpy as np

from penstock_learner.dataflow import BatchContext, Roles, SequenceBatch, StepContext, gather_all, update_policy


async def ahead(batch: SequenceBatch, roles: Roles, context: BatchContext) -> SequenceBatch:
    """The teacher reads the next batch while the policy trains on this one."""
    return batch.with_token_fields(teacher_log_probs=await roles.teacher.log_probs(batch))


async def step(batch: SequenceBatch, roles: Roles, context: StepContext) -> tuple[SequenceBatch, dict[str, float]]:
    """Train the policy towards the teacher."""
    batch, log_probs = await gather_all(context.ahead(), roles.policy.log_probs(batch))
    batch = batch.with_token_fields(old_log_probs=log_probs)
    trained = batch["loss_mask"] == 1
    gap = np.where(trained, batch["teacher_log_probs"] - batch["old_log_probs"], 0)
    batch = batch.with_token_fields(advantages=gap)
    await update_policy(roles.policy, context.minibatches(batch), context)
    return batch, {"teacher_kl": float(-gap[trained].mean())}
