"""Writes the `metrics.jsonl` of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.samples.sample import Sample


class JsonlLogger:
    """Writes one line per step, with the learner's own names, and flushes it at once.

    When a run resumes, the lines of steps after `resume_step` are dropped: they are trained again."""

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text().splitlines():
                try:
                    if json.loads(line)["step"] <= resume_step:
                        kept.append(line + "\n")
                except (ValueError, KeyError):
                    continue
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.rename(path)
        self._file = path.open("a", buffering=1)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Write the step. Numbers that are not finite, as in a skipped step, become null: JSON cannot express them."""
        line = {name: _rounded(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Does nothing: `samples.jsonl` has them."""

    def log_validation(self, step: int, scores: Mapping[str, float]) -> None:
        """Does nothing: `validation.jsonl` has them."""

    def close(self) -> None:
        self._file.close()


def _rounded(value: float) -> float:
    """Seven digits, which is what float32 has. Times and large counts keep all digits up to a thousandth."""
    return float(f"{value:.7g}") if abs(value) < 1e6 else round(value, 3)
