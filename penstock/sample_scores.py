"""Scores of a policy from several samples per prompt: mean@k, pass@k, best@k and maj@k."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

PASS_SCORE = 1.0
ACCURACY = "acc"
"""The part of a reward that says whether the answer is right, as verl names it."""


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

    Prompts without samples, because they failed, are skipped."""
    answered = [samples for samples in scores if samples]
    flat = [score for samples in answered for score in samples]
    fewest = min(map(len, answered), default=0)
    ks = sorted({1 << power for power in range(fewest.bit_length())} | ({fewest} if fewest else set()))
    return ScoreSummary(
        num_prompts=len(answered),
        num_samples=len(flat),
        mean=math.fsum(flat) / len(flat) if flat else 0.0,
        pass_at={
            k: _mean(
                [pass_at_k(len(samples), sum(score >= pass_score for score in samples), k) for samples in answered]
            )
            for k in ks
        },
    )


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class PromptSamples:
    """The samples of one prompt."""

    data_source: str
    rewards: tuple[float, ...]
    answers: tuple[str, ...] = ()
    """The answer that the reward has read from each sample. Empty if it does not say."""
    accuracies: tuple[float, ...] = ()
    """The part `acc` of each sample's reward. Empty if the reward has none."""


def scores_by_source(prompts: Sequence[PromptSamples]) -> dict[str, dict[str, float]]:
    """Scores of each data source under verl's names, where k is the smallest number of samples of its prompts:

    mean@k       mean reward over all samples
    best@k/mean  expected reward of the best of k samples, drawn with replacement as verl draws them; from k = 2 on
    maj@k/mean   expected reward of the most frequent answer of k samples; if the reward reports its answers

    If every reward has a part `acc`, the same for it under `acc/mean@k` and so on."""
    by_source: dict[str, list[PromptSamples]] = {}
    for prompt in prompts:
        if prompt.rewards:
            by_source.setdefault(prompt.data_source, []).append(prompt)
    return {source: _source_scores(answered) for source, answered in sorted(by_source.items())}


def _source_scores(prompts: Sequence[PromptSamples]) -> dict[str, float]:
    answers = [prompt.answers for prompt in prompts]
    scores = _scores([prompt.rewards for prompt in prompts], answers)
    if all(len(prompt.accuracies) == len(prompt.rewards) for prompt in prompts):
        accuracies = _scores([prompt.accuracies for prompt in prompts], answers)
        scores |= {f"{ACCURACY}/{name}": value for name, value in accuracies.items()}
    return scores


def _scores(values: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """The scores of prompts with these values of their samples."""
    k = min(map(len, values))
    scores = {f"mean@{k}": _mean(list(map(_mean, values)))}
    if k > 1:
        scores[f"best@{k}/mean"] = _mean([best_at_k(of_prompt, k) for of_prompt in values])
        pairs = list(zip(values, answers, strict=True))
        if all(len(of_prompt) == len(given) for of_prompt, given in pairs):
            scores[f"maj@{k}/mean"] = _mean([maj_at_k(of_prompt, given, k) for of_prompt, given in pairs])
    return scores


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Expected maximum of k rewards that are drawn with replacement."""
    ordered, n = sorted(rewards), len(rewards)
    return math.fsum(
        reward * ((place / n) ** k - ((place - 1) / n) ** k) for place, reward in enumerate(ordered, start=1)
    )


def maj_at_k(rewards: Sequence[float], answers: Sequence[str], k: int, num_draws: int = 1000, seed: int = 42) -> float:
    """Mean reward of the most frequent answer among k samples, over `num_draws` draws with replacement. Among
    equally frequent answers the first one drawn counts."""
    draws = _draws(len(rewards), k, num_draws, seed)
    numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
    drawn = np.array([numbers[answer] for answer in answers])[draws]
    of_draw = np.arange(num_draws)[:, None]
    counts = np.bincount((of_draw * len(numbers) + drawn).ravel(), minlength=num_draws * len(numbers))
    first = counts.reshape(num_draws, -1)[of_draw, drawn].argmax(axis=1)  # the first place of the most frequent answer
    return float(np.array(rewards)[draws[np.arange(num_draws), first]].mean())


@lru_cache(maxsize=16)
def _draws(num_samples: int, k: int, num_draws: int, seed: int) -> NDArray[np.int64]:
    """[draws, k] numbers of samples. All prompts share them, because a validation may have thousands of prompts."""
    chance = random.Random(seed)
    return np.array([chance.choices(range(num_samples), k=k) for _ in range(num_draws)])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
