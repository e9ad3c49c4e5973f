"""Scores of a policy from several samples per prompt: mean@k and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PASS_SCORE = 1.0


@dataclass(frozen=True)
class ScoreSummary:
    num_prompts: int
    num_samples: int
    mean: float
    """Mean over all samples. This is mean@k if every prompt has k samples."""
    pass_at: dict[int, float]
    """pass@k by k: the probability that at least one of k samples of a prompt passes. The k are the powers of two up to
    the smallest number of samples of any prompt, and that number itself."""


def summarise(scores: Sequence[Sequence[float]], pass_score: float = PASS_SCORE) -> ScoreSummary:
    """Summarise `scores`, which has one list per prompt with one score per sample. A sample passes if its score is at
    least `pass_score`.

    Prompts without samples, because they failed, are left out."""
    answered = [samples for samples in scores if samples]
    flat = [score for samples in answered for score in samples]
    fewest = min(map(len, answered), default=0)
    ks = sorted({1 << power for power in range(fewest.bit_length())} | ({fewest} if fewest else set()))
    return ScoreSummary(
        num_prompts=len(answered),
        num_samples=len(flat),
        mean=math.fsum(flat) / len(flat) if flat else 0.0,
        pass_at={k: _mean_pass_at(answered, k, pass_score) for k in ks},
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _mean_pass_at(answered: Sequence[Sequence[float]], k: int, pass_score: float) -> float:
    estimates = [pass_at_k(len(samples), sum(score >= pass_score for score in samples), k) for samples in answered]
    return math.fsum(estimates) / len(estimates)
