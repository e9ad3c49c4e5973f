"""The protocol of a logger. To add one: a class here, its name in `penstock/config/loggers.py` and in `opening.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class StepLogger(Protocol):
    """Is made, called and closed in one thread of its own, so it may be slow. What it raises ends it, and nothing else.

    A logger is made for the steps after `resume_step`, with which an earlier one may have got further: the same steps
    come again."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """The numbers of one step, under the learner's own names; `step` is among them."""

    def close(self) -> None:
        """No step follows."""
