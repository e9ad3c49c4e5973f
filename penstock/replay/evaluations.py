"""Evaluations of a run, as the queue keeps them: progress, scores, and groups for the learner's reward model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Evaluation:
    """Progress and scores of an evaluation."""

    evaluation_id: str
    num_prompts: int
    num_finished: int
    score: float
    policy_version_min: int
    policy_version_max: int
    num_samples: int = 0
    pass_at: dict[int, float] = field(default_factory=dict)
    """pass@k over the prompts finished so far: see `penstock.sample_scores`. A sample passes with a reward of 1."""
    num_failed: int = 0
    """Finished prompts that have no samples, because they failed too often or nobody could answer them. The score does
    not contain them."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict)
    """Scores of each data source: see `penstock.sample_scores.scores_by_source`."""


def is_numbered(evaluation_id: str) -> bool:
    """Whether the id ends in a number, such as the step of a validation. Scores of other evaluations have no history,
    and the learner does not see them."""
    benchmark, _, number = evaluation_id.rpartition("-")
    return benchmark != "" and number.isascii() and number.isdigit()


@dataclass(frozen=True)
class KeptGroups:
    """The groups of an evaluation that are kept for the learner's reward model."""

    prompt_ids: tuple[int, ...] = ()
    num_left_out: int = 0
    """Groups for which there was no room."""


KEPT_EVALUATION_S = 3600
"""How long the groups of an evaluation are kept after the last of them was recorded."""
KEPT_EVALUATION_SHARE = 4
"""The kept groups of one evaluation have at most `replay.capacity_bytes` divided by this."""
