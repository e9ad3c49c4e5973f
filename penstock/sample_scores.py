"""Scores of a policy from several samples per prompt: mean@k, pass@k, best@k and maj@k."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

PASS_SCORE = 1.0
ACCURACY = "acc"
"""The part of a reward that says whether the answer is right, as verl names it."""
MAX_PARTS = 32
"""Parts of a reward that are kept of a held-out prompt."""
Parts = Mapping[str, Sequence[float | None]]
"""Parts of the rewards of a prompt's samples by name, with None for a sample whose reward lacks the part."""


@dataclass(frozen=True)
class PromptSamples:
    """The samples of one prompt."""

    data_source: str
    rewards: tuple[float, ...]
    answers: tuple[str, ...] = ()
    """The answer that the reward has read from each sample. Empty if it does not say."""
    parts: Parts = field(default_factory=dict)

    def scores(self, part: str) -> Sequence[float | None]:
        """This part of each sample's reward, or the rewards if the name is empty."""
        return self.parts.get(part, [None] * len(self.rewards)) if part else self.rewards


def parts_by_name(samples: Sequence[Mapping[str, float]]) -> Parts:
    """The parts of these rewards, without those that are not finite."""
    names = list(dict.fromkeys(name for parts in samples for name in parts))[:MAX_PARTS]
    values = {name: [parts.get(name, math.nan) for parts in samples] for name in names}
    return {name: [value if math.isfinite(value) else None for value in found] for name, found in values.items()}


@dataclass(frozen=True)
class ScoreSummary:
    num_prompts: int
    num_samples: int
    mean: float
    """Mean over all samples. This is mean@k if every prompt has k samples."""
    pass_at: dict[int, float]
    """pass@k by k: the probability that at least one of k samples of a prompt passes. The k are the powers of two up to
    the smallest number of samples of any prompt, and that number itself. Empty if no reward has the chosen part."""
    parts: dict[str, float]
    """Mean of each part of the reward: see `part_means`."""


def summarise(prompts: Iterable[PromptSamples], pass_score: float = PASS_SCORE, part: str = "") -> ScoreSummary:
    """Summarise the samples. One passes if its reward, or the chosen part of it, is at least `pass_score`; a sample
    without that part does not pass.

    Prompts without samples, because they failed, are skipped."""
    answered = [prompt for prompt in prompts if prompt.rewards]
    flat = [reward for prompt in answered for reward in prompt.rewards]
    parts = part_means(answered)
    is_known = not part or part in parts
    fewest = min((len(prompt.rewards) for prompt in answered), default=0) if is_known else 0
    ks = sorted({1 << power for power in range(fewest.bit_length())} | ({fewest} if fewest else set()))
    passed = [
        (len(prompt.rewards), sum(value is not None and value >= pass_score for value in prompt.scores(part)))
        for prompt in answered
    ]
    return ScoreSummary(
        num_prompts=len(answered),
        num_samples=len(flat),
        mean=math.fsum(flat) / len(flat) if flat else 0.0,
        pass_at={k: fmean([pass_at_k(*counts, k) for counts in passed]) for k in ks},
        parts=parts,
    )


def part_means(prompts: Sequence[PromptSamples]) -> dict[str, float]:
    """Mean of each part over the samples whose reward has it."""
    names = sorted({name for prompt in prompts for name in prompt.parts})
    known = {name: [v for prompt in prompts for v in prompt.scores(name) if v is not None] for name in names}
    return {name: fmean(values) for name, values in known.items() if values}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021)."""
    if not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples, not {num_samples}")
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def by_source(prompts: Iterable[PromptSamples]) -> dict[str, list[PromptSamples]]:
    found: dict[str, list[PromptSamples]] = {}
    for prompt in prompts:
        found.setdefault(prompt.data_source, []).append(prompt)
    return dict(sorted(found.items()))


def scores_by_source(prompts: Iterable[PromptSamples]) -> dict[str, dict[str, float]]:
    """Scores of each data source under verl's names, where k is the smallest number of samples of its prompts:

    mean@k       mean reward over all samples
    best@k/mean  expected reward of the best of k samples, drawn with replacement as verl draws them; from k = 2 on
    maj@k/mean   expected reward of the most frequent answer of k samples; if the reward reports its answers

    If every reward has a part `acc`, the same for it under `acc/mean@k` and so on."""
    answered = by_source(prompt for prompt in prompts if prompt.rewards)
    return {source: _source_scores(own) for source, own in answered.items()}


def _source_scores(prompts: Sequence[PromptSamples]) -> dict[str, float]:
    answers = [prompt.answers for prompt in prompts]
    scores = _scores([prompt.rewards for prompt in prompts], answers)
    accuracies = [[value for value in prompt.scores(ACCURACY) if value is not None] for prompt in prompts]
    if all(len(known) == len(prompt.rewards) for known, prompt in zip(accuracies, prompts, strict=True)):
        scores |= {f"{ACCURACY}/{name}": value for name, value in _scores(accuracies, answers).items()}
    return scores


def _scores(values: Sequence[Sequence[float]], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """The scores of prompts with these values of their samples."""
    k = min(map(len, values))
    scores = {f"mean@{k}": fmean(list(map(fmean, values)))}
    if k > 1:
        scores[f"best@{k}/mean"] = fmean([best_at_k(of_prompt, k) for of_prompt in values])
        pairs = list(zip(values, answers, strict=True))
        if all(len(of_prompt) == len(given) for of_prompt, given in pairs):
            scores[f"maj@{k}/mean"] = fmean([maj_at_k(of_prompt, given, k) for of_prompt, given in pairs])
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
