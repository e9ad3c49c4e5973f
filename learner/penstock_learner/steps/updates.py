"""The updates of policy and critic, for steps."""

from __future__ import annotations

from collections.abc import Sequence

from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.steps.advantages import denominators_of
from penstock_learner.steps.context import StepContext
from penstock_learner.steps.roles import Role, Update


async def update_policy(policy: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of the policy for each part, one after another.

    The parts need `advantages`, `old_log_probs` if the correction recomputes them, and `reference_log_probs` if the KL
    penalty is in the loss."""
    _require("advantages", parts)
    if context.recomputes_log_probs:
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


def _require(name: str, parts: Sequence[SequenceBatch]) -> None:
    """Raise ValueError, which lists the fields that there are, if a part lacks this one."""
    for part in parts:
        part[name]
