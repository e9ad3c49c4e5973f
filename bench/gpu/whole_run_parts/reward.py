"""The reward of the whole runs, with the signature of verl's `compute_score`. Rollout servers load this file alone."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The share of vowels in a response. It differs between the samples of a group, so that every group trains."""
    return sum(map(solution_str.count, "aeiou")) / max(1, len(solution_str))
