"""The protocol of a logger.

To add a logger, write a class in this folder and add its name to `penstock/config/loggers.py` and `opening.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.samples.sample import Sample


class StepLogger(Protocol):
    """A logger is made, called and closed in one thread of its own, so it may be slow. An error ends only the logger.

    It is made for the steps after `resume_step`. An earlier logger of the run may have logged some of these steps
    already."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step, under the learner's own names. `step` is one of them."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write some samples of a step, the worst first. `samples.jsonl` has all of them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Write the scores of validations that are finished, under verl's names. `step` is the step that they scored,
        which may be some steps ago."""

    def close(self) -> None:
        """Called when no step follows."""
