"""When the start-up check of log-probs ends the learner, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from groups import make_group
from penstock.errors import ConfigError
from penstock.trajectory import Sampling
from penstock_learner.loop.logprob_check import LogProbCheck

GROUPS = [make_group(1), make_group(2)]


def test_a_step_without_comparable_tokens_decides_nothing() -> None:
    check = LogProbCheck(0.1)
    check.check({}, GROUPS)
    with pytest.raises(ConfigError, match=r"disagree by 0\.2 nats per token on the same weights, more than 0\.1"):
        check.check({"logprob_mismatch": 0.2}, GROUPS)


def test_a_passed_check_does_not_look_again() -> None:
    check = LogProbCheck(0.1)
    check.check({"logprob_mismatch": 0.1}, GROUPS)
    check.check({"logprob_mismatch": 5.0}, GROUPS)


def test_the_last_figure_is_kept_through_steps_without_one() -> None:
    check = LogProbCheck(0.1)
    assert check.last == {}
    for metrics in ({"logprob_mismatch": 0.1}, {"logprob_mismatch": 0.05}, {}):
        check.check(metrics, GROUPS)
    assert check.last == {"logprob_mismatch": 0.05}


def test_zero_never_refuses() -> None:
    LogProbCheck(0.0).check({"logprob_mismatch": 50.0}, GROUPS)


def test_the_limit_allows_for_top_p() -> None:
    """With top-p 0.5 the engine's log-probs are higher by up to log 2."""
    narrow = [GROUPS[0], replace(GROUPS[1], sampling=Sampling(top_p=0.5))]
    LogProbCheck(0.1).check({"logprob_mismatch": 0.75}, narrow)
    with pytest.raises(ConfigError):
        LogProbCheck(0.1).check({"logprob_mismatch": 0.85}, narrow)
