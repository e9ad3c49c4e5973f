"""PPO with two critics: advantages use the lower of their values, against values that are too high.

Each critic learns from one half of the samples. So they differ, although both start from the same model.
"""

import numpy as np

from penstock_learner.dataflow import (
    Roles,
    SequenceBatch,
    StepContext,
    gather_all,
    gather_fields,
    update_critic,
    update_policy,
    with_advantages,
)


async def step(batch: SequenceBatch, roles: Roles, context: StepContext) -> tuple[SequenceBatch, dict[str, float]]:
    """Train the policy and both critics, all at the same time."""
    forwards = gather_fields(
        old_log_probs=roles.policy.log_probs(batch) if context.recomputes_log_probs else None,
        values=roles.critic.values(batch),
        second_values=roles.second_critic.values(batch),
    )
    batch, computed = await gather_all(context.ahead(), forwards)
    batch = batch.with_token_fields(**computed)
    first, second = batch["values"], batch["second_values"]
    batch = batch.with_token_fields(values=np.minimum(first, second))
    batch = with_advantages(batch, context.algorithm, context.kl_coefficient)
    halves = [list(range(start, batch.num_sequences, 2)) for start in (0, 1)]
    # The value loss clips around the value that the same critic gave before.
    of_first = batch.with_token_fields(values=first).select(halves[0])
    of_second = batch.with_token_fields(values=second).select(halves[1])
    await gather_all(
        update_policy(roles.policy, context.minibatches(batch), context),
        update_critic(roles.critic, context.minibatches(of_first, "critic"), context),
        update_critic(roles.second_critic, context.minibatches(of_second, "second_critic"), context),
    )
    return batch, {"critic_gap": float(np.abs(first - second).mean())}
