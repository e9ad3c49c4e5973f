"""How many samples go to a reward process in one message."""

from __future__ import annotations

from penstock_rollout.rewards.pool import TOGETHER_S, RewardPace

SAMPLES = list(range(8))


def sizes(pace: RewardPace, settings: str = "fast") -> list[int]:
    parts = pace.parts(settings, SAMPLES)
    assert [sample for part in parts for sample in part] == SAMPLES
    return [len(part) for part in parts]


def test_samples_go_alone_until_the_reward_is_known() -> None:
    pace = RewardPace()
    assert sizes(pace) == [1] * 8
    pace.note("fast", TOGETHER_S / 100, 1)
    assert sizes(pace) == [8]
    assert sizes(pace, "other") == [1] * 8


def test_a_message_holds_as_many_samples_as_fit_its_time() -> None:
    pace = RewardPace()
    pace.note("fast", TOGETHER_S, 3)
    assert sizes(pace) == [3, 3, 2]
    pace.note("fast", 0.0, 8)
    assert sizes(pace) == [3, 3, 2], "one fast message does not make a fast reward"
    for _ in range(20):
        pace.note("fast", 0.0, 8)
    assert sizes(pace) == [8]


def test_a_slow_sample_or_a_failed_message_separates_the_samples() -> None:
    pace = RewardPace()
    pace.note("fast", 0.0, 8)
    pace.note("fast", 8 * 30 * TOGETHER_S, 8)
    assert sizes(pace) == [1] * 8
    pace.note("known", 0.0, 8)
    pace.forget("known")
    assert sizes(pace, "known") == [1] * 8
