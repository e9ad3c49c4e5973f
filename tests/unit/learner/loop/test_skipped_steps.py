"""The run ends after too many steps in a row without a finite loss, and its error says where to look."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import TrainingDiverged
from penstock_learner.algorithms.losses import CorrectionStatistics, LossStatistics, Mismatch
from penstock_learner.batches.partition import partition
from penstock_learner.batches.sequence_batch import batch_of
from penstock_learner.optim.optimizer import OptimizerStep
from penstock_learner.roles.dispatch import UpdateReport
from penstock_learner.steps.roles import Update
from penstock_learner.steps.step_result import SkippedSteps
from support.groups import make_group

BATCH = batch_of([make_group(prompt_id) for prompt_id in (11, 12)])
SHARDS = partition(BATCH, 2, 1000)
ZERO = torch.tensor(0.0)


def reports(*, skipped: bool, nonfinite: tuple[int, ...] = ()) -> list[UpdateReport]:
    """Reports of two ranks. `nonfinite` lists micro-batches of the second."""
    step = OptimizerStep(float("inf") if skipped else 1.0, 1e-6, skipped)
    sums = (
        LossStatistics(*[ZERO] * 5),
        CorrectionStatistics(*[ZERO] * len(fields(CorrectionStatistics))),
        Mismatch(ZERO, ZERO),
    )
    return [UpdateReport(0.0, step, own, 0.0, 0.0, *sums) for own in ((), nonfinite)]


def test_the_error_names_the_last_skipped_step_and_keeps_its_batch(tmp_path: Path) -> None:
    skipped = SkippedSteps(2, tmp_path / "nonfinite")
    skipped.check(Update("policy", BATCH, SHARDS, reports(skipped=True)), 7)
    with pytest.raises(TrainingDiverged, match=r"the policy's loss of prompts .*12.* was not finite at step 8"):
        skipped.check(Update("policy", BATCH, SHARDS, reports(skipped=True, nonfinite=(0,))), 8)
    saved = np.load(tmp_path / "nonfinite" / "step-00000008.npz")
    assert saved["nonfinite_sequences"].tolist() == SHARDS[1].sequences[0]
    np.testing.assert_array_equal(saved["token_ids"], BATCH.token_ids)


def test_a_bad_gradient_of_a_finite_loss_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(TrainingDiverged, match=r"the policy's gradient norm \(inf\) was not finite at step 1"):
        SkippedSteps(1, tmp_path).check(Update("policy", BATCH, SHARDS, reports(skipped=True)), 1)


def test_a_good_step_between_starts_the_count_again(tmp_path: Path) -> None:
    skipped = SkippedSteps(2, tmp_path)
    for step, is_bad in enumerate([True, False, True, False, True]):
        skipped.check(Update("policy", BATCH, SHARDS, reports(skipped=is_bad)), step)
    assert not list(tmp_path.iterdir())


def test_roles_are_counted_apart(tmp_path: Path) -> None:
    skipped = SkippedSteps(2, tmp_path)
    skipped.check(Update("policy", BATCH, SHARDS, reports(skipped=True)), 1)
    skipped.check(Update("critic", BATCH, SHARDS, reports(skipped=True)), 1)
    skipped.check(Update("policy", BATCH, SHARDS, reports(skipped=False)), 2)
    with pytest.raises(TrainingDiverged, match=r"the critic's gradient norm .* lower learner.critic.lr"):
        skipped.check(Update("critic", BATCH, SHARDS, reports(skipped=True)), 2)


def test_a_limit_of_zero_never_ends_the_run(tmp_path: Path) -> None:
    skipped = SkippedSteps(0, tmp_path)
    for step in range(10):
        skipped.check(Update("policy", BATCH, SHARDS, reports(skipped=True)), step)
