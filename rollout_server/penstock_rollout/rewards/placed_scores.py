"""Scores that a reward function gives to parts of a response: turns, tokens, or places in its text.

    {"score": 1.0,
     "turn_scores": [0.1, -0.2],              one number per turn of the assistant
     "token_scores": [0.0, 0.0, 0.5],         one number per token, or {token: score}
     "text_scores": [[41, 0.5], [97, -1.0]]}  [character of solution_str, score], or {character: score}

All of them are part of the sample's reward, which is their sum with `score`; `score` may be left out. Advantage
estimation credits each at its token, and the rest of the reward at the last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from penstock.reward_bounds import RANGE, is_reward

KINDS = {"turn_scores": "turn", "token_scores": "token", "text_scores": "text"}


class PlacedScore(NamedTuple):
    kind: str
    """`turn`, `token` or `text`."""
    place: int
    """Number of the turn or token, or index of the character."""
    score: float


def read_placed(result: Any) -> list[PlacedScore]:
    """The scores of parts in what a reward function returned. Raises ValueError if one is malformed."""
    if not isinstance(result, Mapping):
        return []
    return [
        _checked(key, kind, place, score)
        for key, kind in KINDS.items()
        for place, score in _entries(key, result.get(key))
    ]


def place_scores(
    scores: Iterable[PlacedScore], loss_mask: Sequence[int], start: int, text_length: Callable[[int], int]
) -> dict[int, float]:
    """The scores by the index of their token in a sample.

    The scored text begins with token `start`; `text_length(n)` is the number of characters of its first n tokens. A
    place in what the model did not write counts for the token that it wrote last before. Places after the end, and
    turns after the last one, count for the last token."""
    trained = [index for index, is_trained in enumerate(loss_mask) if is_trained]
    ends = [index for index, after in pairwise([*trained, len(loss_mask) + 1]) if after != index + 1]
    rewards: dict[int, float] = {}
    for kind, place, score in scores:
        if kind == "turn":
            index = ends[min(place, len(ends) - 1)]
        elif kind == "token":
            index = start + place
        else:
            num_tokens = len(loss_mask) - start
            index = start + bisect_right(range(1, num_tokens + 1), place, key=text_length)
        nearest = trained[max(0, bisect_right(trained, index) - 1)]
        rewards[nearest] = rewards.get(nearest, 0.0) + score
    return rewards


def _entries(key: str, given: Any) -> Iterable[tuple[Any, Any]]:
    if given is None:
        return ()
    given = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(given, Mapping):
        return given.items()
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ValueError(f"the reward function returned {type(given).__name__} as `{key}`, not a list or a mapping")
    if key != "text_scores":
        return enumerate(given)
    if any(not isinstance(pair, Sequence) or len(pair) != 2 for pair in given):
        raise ValueError("the reward function returned `text_scores` that are not pairs of a character and a score")
    return [(pair[0], pair[1]) for pair in given]


def _checked(key: str, kind: str, place: Any, score: Any) -> PlacedScore:
    try:
        found = PlacedScore(kind, int(place), float(score))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the reward function returned {place!r}: {score!r} in `{key}`, not numbers") from error
    if found.place < 0 or not is_reward(found.score):
        raise ValueError(f"the reward function returned {place!r}: {score!r} in `{key}`; scores must be {RANGE}")
    return found
