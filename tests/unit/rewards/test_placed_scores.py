"""Scores that a reward function gives to turns, tokens and places of the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock_rollout.rewards.function import PlacedScore, place_scores, read_placed, read_score


def test_lists_and_mappings_are_read_and_added_to_the_score() -> None:
    result = {
        "score": 1,
        "turn_scores": [0.5, -0.25],
        "token_scores": {"3": 2.0},
        "text_scores": [[7, 0.125]],
    }
    assert read_placed(result) == [("turn", 0, 0.5), ("turn", 1, -0.25), ("token", 3, 2.0), ("text", 7, 0.125)]
    assert read_score(result)[:2] == (3.375, {"score": 1.0})
    assert read_score({"turn_scores": np.array([1.0, 2.0])})[:2] == (3.0, {})
    assert read_score({"score": 2.0})[:2] == (2.0, {"score": 2.0}) and read_placed(1.0) == []


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"turn_scores": "a"}, "str as `turn_scores`, not a list"),
        ({"token_scores": ["a"]}, "0: 'a' in `token_scores`, not numbers"),
        ({"token_scores": {-1: 1.0}}, "-1: 1.0 in `token_scores`"),
        ({"text_scores": [1.0]}, "not pairs of a character and a score"),
        ({"turn_scores": [float("nan")]}, "scores must be"),
        ({}, "without `score`"),
    ],
)
def test_what_is_not_a_score_fails_the_reward(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_score(result)


def test_scores_are_placed_on_tokens_that_the_model_wrote() -> None:
    """Two turns with a reply between them: tokens 0 to 2 and 5 to 6. Each token has two characters."""
    mask = [1, 1, 1, 0, 0, 1, 1]

    def placed(kind: str, place: int, start: int = 0) -> int:
        ((index, score),) = place_scores([PlacedScore(kind, place, 0.5)], mask, start, lambda n: 2 * n).items()
        assert score == 0.5
        return index

    assert [placed("turn", turn) for turn in (0, 1, 2)] == [2, 6, 6]
    assert [placed("token", token) for token in range(8)] == [0, 1, 2, 2, 2, 5, 6, 6]
    assert [placed("text", place) for place in (0, 1, 2, 5, 6, 10, 13, 99)] == [0, 0, 1, 2, 2, 5, 6, 6]
    assert [placed("token", token, 5) for token in (0, 1)] == [5, 6], "the text of the last turn alone is scored"
    assert placed("text", 2, 5) == 6
    both = [PlacedScore("turn", 0, 1.0), PlacedScore("token", 2, 2.0)]
    assert place_scores(both, mask, 0, lambda n: n) == {2: 3.0}, "scores of one token add up"
