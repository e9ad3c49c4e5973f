"""The updates of policy and critic, for steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock_learner.batches.partition import unpermute
from penstock_learner.batches.sequence_batch import SequenceBatch, token_ranges
from penstock_learner.steps.advantages import denominators_of
from penstock_learner.steps.context import StepContext
from penstock_learner.steps.roles import Role, Update


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
    """The indices of the response tokens of these sequences."""
    lengths = batch.response_lengths
    return token_ranges((np.cumsum(lengths) - lengths)[sequences], lengths[sequences])


async def update_policy(policy: Role, parts: Sequence[SequenceBatch], context: StepContext) -> list[Update]:
    """One optimizer step of the policy for each part, one after another.

    The parts need `advantages`, `old_log_probs` if the correction recomputes them and there is more than one update,
    and `reference_log_probs` if the KL penalty is in the loss. The first part may lack `old_log_probs`, or have NaN."""
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
