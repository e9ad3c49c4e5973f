"""What several samples of each prompt say about a policy: mean@k and pass@k."""

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
    """Over all samples: mean@k, where every prompt has k."""
    pass_at: dict[int, float]
    """k: the chance that at least one of k samples of a prompt passes; k are powers of two, and the fewest samples that
    a prompt has."""


def summarise(scores: Sequence[Sequence[float]], pass_score: float = PASS_SCORE) -> ScoreSummary:
    """`scores` has one entry a prompt, with one a sample. A sample passes with at least `pass_score`.

    Prompts without samples, which failed, are left out."""
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
    """The unbiased estimate 1 - C(n - c, k) / C(n, k) of Chen et al., 2021."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _mean_pass_at(answered: Sequence[Sequence[float]], k: int, pass_score: float) -> float:
    estimates = [pass_at_k(len(samples), sum(score >= pass_score for score in samples), k) for samples in answered]
    return math.fsum(estimates) / len(estimates)
