"""A judge on its own GPUs: its score is added to the reward before advantages are computed.

The step is our own GRPO. Only what runs a step ahead is replaced, so the judge reads the next batch while the policy
trains on this one.
"""

from penstock_learner.dataflow import BatchContext, Roles, SequenceBatch

WEIGHT = 0.5


async def ahead(batch: SequenceBatch, roles: Roles, context: BatchContext) -> SequenceBatch:
    """Add the judge's scores, which are probabilities, to the rewards of the rollout servers."""
    scores = await roles.judge.scores(batch)
    return batch.with_sequence_fields(judge_scores=scores, rewards=batch.rewards + WEIGHT * scores)
