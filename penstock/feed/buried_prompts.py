"""Watches a dataset whose prompts are dead-lettered, so that a run does not bury all of them."""

from __future__ import annotations

from collections.abc import Mapping

MIN_BURIED = 32
"""Prompts with the same reason that must be dead-lettered before their share counts."""


class BuriedPrompts:
    """Compares dead letters with the groups that were made since the feed began, or since the run was last paused."""

    def __init__(self, limit: float | None) -> None:
        """`limit` is the share of prompts with one reason at which the run pauses; None for never."""
        self.limit = limit
        self._reasons: Mapping[str, int] | None = None
        self._inserted = 0

    def reason_to_pause(self, num_inserted: int, reasons: Mapping[str, int]) -> str:
        """Why the run should pause, or an empty text. Both counts are since the run began. The answer stays until
        `begin_anew` is called."""
        if self._reasons is None:
            self.begin_anew(num_inserted, reasons)
        before = self._reasons or {}
        new = {reason: count - before.get(reason, 0) for reason, count in reasons.items()}
        num_finished = num_inserted - self._inserted + sum(new.values())
        for reason, count in new.items():
            if self.limit is not None and count >= MIN_BURIED and count >= self.limit * num_finished:
                return (
                    f"{count} of the newest {num_finished} prompts were dead-lettered with {reason}; correct the "
                    "dataset or rollout.prompt, or raise dataset.max_buried_share; `penstock queue dlq` lists them"
                )
        return ""

    def begin_anew(self, num_inserted: int, reasons: Mapping[str, int]) -> None:
        """Compare with these counts from here on. Called once the run is paused."""
        self._reasons, self._inserted = dict(reasons), num_inserted
