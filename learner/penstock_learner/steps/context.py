"""What a step knows besides its batch and its roles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config.algorithms import AlgorithmConfig
from penstock.config.learner import LearnerConfig
from penstock.trajectory import Group
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.steps.roles import Roles


@dataclass(frozen=True)
class BatchContext:
    """What is known when a batch has been read, maybe a step ahead of its training."""

    config: LearnerConfig
    groups: Sequence[Group]
    """The groups that the batch was made of, in its order."""

    @property
    def algorithm(self) -> AlgorithmConfig:
        return self.config.algorithm

    @property
    def data_sources(self) -> list[str]:
        """The data source of each sequence."""
        return [group.data_source for group in self.groups for _ in group.trajectories]


class AheadBatch:
    """The batch with what was computed a step ahead, or is still being computed."""

    def __init__(self, computing: asyncio.Future[SequenceBatch]) -> None:
        self.computing = computing
        self.was_read = False

    async def read(self) -> SequenceBatch:
        self.was_read = True
        return await self.computing


@dataclass(frozen=True)
class StepContext(BatchContext):
    """What is known when the batch is trained."""

    step: int
    """Number of the step, from 1."""
    version: int
    """Version of the policy's weights before the step."""
    kl_coefficient: float
    ahead_batch: AheadBatch

    async def ahead(self) -> SequenceBatch:
        """The batch with the fields that the program's `ahead` computes. Every step must await it.

        It may not be ready yet: await it together with calls that do not need its fields."""
        return await self.ahead_batch.read()

    @property
    def recomputes_log_probs(self) -> bool:
        """Whether the correction needs the policy's own log-probs of the batch, before the first update."""
        return self.config.recomputes_log_probs

    def minibatches(self, batch: SequenceBatch) -> list[SequenceBatch]:
        """The parts of the batch in the order in which they are trained: all parts, once for each epoch.

        Parts are made of neighbouring sequences, or with `shuffle_minibatches` of random ones, which are others in each
        epoch. Greedy samples, which are not trained, are omitted."""
        if self.config.minibatches_per_step == 1 and not self.config.shuffle_minibatches:
            return [batch.without_baselines()] * self.config.epochs_per_step
        return [batch.select(part.tolist()) for part in self._parts(batch)]

    def first_update(self, batch: SequenceBatch) -> NDArray[np.int64]:
        """The sequences of the first update, if no pass need compute their log-probs before it: its own pass has the
        weights from before the step. None of them if they are trained again, or if the KL penalty is in the reward."""
        if self.config.epochs_per_step > 1 or self.algorithm.kl.in_reward:
            return np.zeros(0, dtype=np.int64)
        return self._parts(batch)[0]

    def _parts(self, batch: SequenceBatch) -> list[NDArray[np.int64]]:
        """The sequences of each part, in the order of `minibatches`."""
        is_baseline = batch.is_baseline
        trained = np.arange(batch.num_sequences) if is_baseline is None else np.flatnonzero(~is_baseline)
        num_parts = max(1, min(self.config.minibatches_per_step, len(trained)))
        epochs = range(self.config.epochs_per_step)
        orders = [trained for _ in epochs]
        if self.config.shuffle_minibatches:
            # numpy guarantees RandomState's streams, so a repeated step has the same parts under every release.
            chances = [np.random.RandomState([self.config.shuffle_seed, self.step, epoch]) for epoch in epochs]
            orders = [trained[chance.permutation(len(trained))] for chance in chances]
        return [part for order in orders for part in np.array_split(order, num_parts)]


Step = Callable[[SequenceBatch, Roles, StepContext], Awaitable[tuple[SequenceBatch, dict[str, float]]]]
"""Trains the roles on a batch, which has no fields from `ahead` yet. Returns the batch with all that was computed, and
its own numbers."""
Ahead = Callable[[SequenceBatch, Roles, BatchContext], Awaitable[SequenceBatch]]
"""Adds what the frozen roles compute. It runs while the batch before it is trained."""
