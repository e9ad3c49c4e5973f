"""The end of a run that no longer learns: too many steps in a row whose loss or gradient was not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from penstock.errors import TrainingDiverged
from penstock_learner.packing import RankShard, SequenceBatch
from penstock_learner.policy_update import UpdateReport


class SkippedSteps:
    """Counts skipped steps in a row; at the limit the batch is kept for inspection and the run ends."""

    def __init__(self, limit: int, folder: Path) -> None:
        self.limit = limit
        self.folder = folder
        self.num_in_a_row = 0

    def check(
        self, step: int, batch: SequenceBatch, shards: Sequence[RankShard], reports: Sequence[UpdateReport]
    ) -> None:
        """After every step; `shards` and `reports` are in the same order."""
        taken = reports[0].step
        assert taken is not None
        if not taken.skipped:
            self.num_in_a_row = 0
            return
        self.num_in_a_row += 1
        if self.limit == 0 or self.num_in_a_row < self.limit:
            return
        guilty = [
            sequence
            for shard, report in zip(shards, reports, strict=True)
            for micro in report.nonfinite
            for sequence in shard.sequences[micro]
        ]
        path = self._save(step, batch, guilty)
        prompts = sorted({int(batch.group_ids[sequence]) for sequence in guilty})
        where = f"the loss of prompts {_listed(prompts)}" if guilty else f"the gradient's norm ({taken.grad_norm})"
        raise TrainingDiverged(
            f"{where} was not finite at step {step}, the {self.num_in_a_row}. such step in a row; look at the batch in "
            f"{path}, then go on from a checkpoint with a lower learner.lr or without these prompts"
        )

    def _save(self, step: int, batch: SequenceBatch, guilty: list[int]) -> Path:
        """The whole batch as arrays, with the numbers of the sequences whose loss was not finite."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{step:08d}.npz"
        arrays = {field.name: getattr(batch, field.name) for field in fields(batch)}
        present = {name: array for name, array in arrays.items() if array is not None}
        np.savez_compressed(path, nonfinite_sequences=np.array(guilty, dtype=np.int64), **present)
        return path


def _listed(prompts: list[int], at_most: int = 8) -> str:
    more = ", …" if len(prompts) > at_most else ""
    return ", ".join(map(str, prompts[:at_most])) + more
