"""mean@k, best@k and maj@k of a validation."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from penstock.sample_scores import (
    MAX_PARTS,
    PromptSamples,
    best_at_k,
    maj_at_k,
    parts_by_name,
    scores_by_source,
    summarise,
)


def test_best_at_k_is_the_mean_over_all_draws() -> None:
    rewards = (0.25, 1.0, -1.0, 0.25)
    for k in (1, 2, 3, 4):
        draws = [max(drawn) for drawn in itertools.product(rewards, repeat=k)]
        assert best_at_k(rewards, k) == pytest.approx(sum(draws) / len(draws))


def test_maj_at_k_takes_the_most_frequent_answer() -> None:
    assert maj_at_k((1.0, 1.0, 1.0), ("4", "4", "4"), 3) == 1.0
    # The right answer wins at least two of three draws with probability 7/27 + ties 1/3 of the rest.
    right_first = [max(dict.fromkeys(d), key=d.count) == "4" for d in itertools.product(("4", "5", "6"), repeat=3)]
    estimate = maj_at_k((1.0, 0.0, 0.0), ("4", "5", "6"), 3, num_draws=20000)
    assert estimate == pytest.approx(sum(right_first) / len(right_first), abs=0.02)


def test_maj_at_k_equals_its_definition() -> None:
    chance = random.Random(7)
    for n, k in ((2, 2), (5, 4), (8, 8), (16, 3)):
        answers = [chance.choice("abcd") for _ in range(n)]
        rewards = [chance.random() for _ in range(n)]
        draws, total = random.Random(42), 0.0
        for _ in range(200):
            drawn = draws.choices(range(n), k=k)
            most = max(dict.fromkeys(answers[i] for i in drawn), key=[answers[i] for i in drawn].count)
            total += next(rewards[i] for i in drawn if answers[i] == most)
        assert maj_at_k(rewards, answers, k, num_draws=200) == pytest.approx(total / 200)


def test_the_draws_of_maj_at_k_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway computes scores while it answers: a validation of thousands of prompts must not hold it up."""
    made = list[int]()
    monkeypatch.setattr("penstock.sample_scores.random.Random", lambda seed: made.append(seed) or random.SystemRandom())
    scores_by_source([PromptSamples("math", (1.0, 0.0) * 37, ("a", "b") * 37)] * 50)
    assert len(made) <= 1


def test_scores_have_verls_names_and_are_apart_by_data_source() -> None:
    scores = scores_by_source(
        [
            PromptSamples("math", (1.0, 0.0), ("a", "b")),
            PromptSamples("math", (1.0, 1.0, 1.0), ("a", "a", "a")),
            PromptSamples("code", (0.5,)),
            PromptSamples("failed", ()),
        ]
    )
    assert scores["code"] == {"mean@1": 0.5}
    assert scores["math"]["mean@2"] == 0.75 and scores["math"]["best@2/mean"] == 0.875
    assert 0.7 < scores["math"]["maj@2/mean"] < 0.8
    assert list(scores) == ["code", "math"]


def test_accuracies_have_scores_of_their_own() -> None:
    first = PromptSamples("aime", (1.0, -1.0), ("4", "5"), {"acc": (1.0, 0.0)})
    scores = scores_by_source([first, PromptSamples("aime", (-1.0, -1.0), ("7", "7"), {"acc": (0.0, 0.0)})])["aime"]
    assert scores["mean@2"] == -0.5 and scores["acc/mean@2"] == 0.25
    assert scores["best@2/mean"] == -0.25 and scores["acc/best@2/mean"] == 0.375
    assert 0.2 < scores["acc/maj@2/mean"] < 0.3
    without = scores_by_source([first, PromptSamples("aime", (-1.0, -1.0))])["aime"]
    assert not [name for name in without if name.startswith("acc")], "not every reward says it"


def test_pass_at_k_may_count_a_part_of_the_reward() -> None:
    parts = parts_by_name([{"acc": 1.0, "format": 1.0}, {"format": 0.5}, {"acc": math.nan, "format": 0.0}])
    assert parts == {"acc": [1.0, None, None], "format": [1.0, 0.5, 0.0]}
    prompts = [
        PromptSamples("math", (2.0, 0.5, 1.5), parts=parts),
        PromptSamples("math", (0.0,) * 3),
        PromptSamples("", ()),
    ]
    summary = summarise(prompts, part="acc")
    assert summary.pass_at == {1: pytest.approx(1 / 6), 2: pytest.approx(1 / 3), 3: 0.5}, "without the part: not passed"
    assert summary.parts == {"acc": 1.0, "format": 0.5} and summary.mean == pytest.approx(4 / 6)
    assert summarise(prompts).pass_at[1] == pytest.approx(1 / 3)
    assert summarise(prompts, part="misspelt").pass_at == {}
    assert len(parts_by_name([{str(name): 1.0 for name in range(1000)}])) == MAX_PARTS
