"""Ends a run that no longer learns: too many steps in a row had a loss or gradient that was not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import TrainingDiverged
from penstock_learner.batches.partition import RankShard
from penstock_learner.batches.sequence_batch import SequenceBatch
from penstock_learner.roles.dispatch import TrainedReport

_RATES = {"policy": "learner.lr", "critic": "learner.critic.lr"}
"""The learning rates of the trained roles. That of any other role is in `learner.roles`."""


class SkippedSteps:
    """Counts the skipped steps in a row of each role. At the limit it saves the batch for inspection and ends the run.

    With a limit of 0 the run never ends for this reason."""

    def __init__(self, limit: int, folder: Path) -> None:
        self.limit = limit
        self.folder = folder
        self.in_a_row: Counter[str] = Counter()

    def check(
        self,
        role: str,
        step: int,
        batch: SequenceBatch,
        shards: Sequence[RankShard],
        reports: Sequence[TrainedReport],
    ) -> None:
        """Call after every update of a trained role. `shards` and `reports` are in the same order."""
        taken = reports[0].step
        if not taken.skipped:
            self.in_a_row[role] = 0
            return
        self.in_a_row[role] += 1
        if self.limit == 0 or self.in_a_row[role] < self.limit:
            return
        nonfinite = [
            sequence
            for shard, report in zip(shards, reports, strict=True)
            for micro in report.nonfinite
            for sequence in shard.sequences[micro]
        ]
        path = self._save(step, batch, nonfinite)
        prompts = sorted({int(batch.group_ids[sequence]) for sequence in nonfinite})
        where = f"loss of prompts {listed(prompts)}" if nonfinite else f"gradient norm ({taken.grad_norm})"
        rate = _RATES.get(role, f"learner.roles.{role}.lr")
        raise TrainingDiverged(
            f"the {role}'s {where} was not finite at step {step} ({self.in_a_row[role]} such steps in a row); look at "
            f"the batch in {path}, then continue from a checkpoint with a lower {rate} or without these prompts"
        )

    def _save(self, step: int, batch: SequenceBatch, nonfinite: list[int]) -> Path:
        """Write the whole batch as arrays, with the indices of the sequences whose loss was not finite."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:08d}.npz"
        arrays: dict[str, Any] = batch.arrays | {"nonfinite_sequences": np.array(nonfinite, dtype=np.int64)}
        np.savez_compressed(path, **arrays)
        return path


def listed(prompts: list[int], at_most: int = 8) -> str:
    """The first prompts, for a message."""
    more = ", …" if len(prompts) > at_most else ""
    return ", ".join(map(str, prompts[:at_most])) + more
