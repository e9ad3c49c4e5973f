"""The file `metrics.jsonl` of a run: a line for each step, with the numbers of docs/metrics.md by name.

The learner's logger `jsonl` writes it. It outlives the run's processes, so it is what is read of a run that has ended.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from penstock.errors import ConfigError

METRICS = "metrics.jsonl"
VALIDATIONS = "validation.jsonl"
"""The scores of the feed's validations, a line for each."""


def read_steps(folder: Path) -> list[dict[str, float]]:
    """The steps of a run, oldest first; empty without the file. Numbers that were not finite are NaN.

    Each step is there once: where a run went back and trained steps again, the newest lines count. A line that is still
    being written, or that a crash has cut off, is skipped."""
    try:
        lines = (folder / METRICS).read_text().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{folder / METRICS} cannot be read: {error.strerror}; run this as its owner") from error
    steps: list[dict[str, float]] = []
    for line in lines:
        try:
            found = json.loads(line)
            step = found["step"]
        except (ValueError, KeyError, TypeError):
            continue
        while steps and steps[-1]["step"] >= step:
            steps.pop()
        steps.append({name: math.nan if value is None else value for name, value in found.items()})
    return steps
