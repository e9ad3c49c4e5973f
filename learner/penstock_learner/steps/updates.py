"""The updates of policy and critic, for steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.partition import unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.steps.advantages import denominators_of
from penstock_learner.steps.context import StepContext
from penstock_learner.steps.roles import Role, Update


async def update_policy(policy: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of the policy for each part, one after another.

    The parts need `advantages`, `old_log_probs` if the correction recomputes them and there is more than one update,
    and `reference_log_probs` if the KL penalty is in the loss."""
    _require("advantages", parts)
    if context.algorithm.correction.recomputes and len(parts) > 1:
        _require("old_log_probs", parts)
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
