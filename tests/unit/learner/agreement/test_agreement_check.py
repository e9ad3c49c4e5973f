"""What the check of log-probs says about a server, step by step."""

from __future__ import annotations

import math

import pytest

from penstock_learner.agreement.servers import (
    MIN_STEPS,
    STRIKES,
    Comparison,
    LogProbCheck,
    ServerVerdict,
    disagreement,
)

NOISE = 1e-6


def found(server: str, nats: float, *, staleness: int = 0, num_tokens: int = 100, top_p: float = 1.0) -> Comparison:
    return Comparison(server, staleness, num_tokens, nats, -math.log(top_p))


def settled(limit: float = 0.1) -> LogProbCheck:
    """A check that knows what is usual for the servers `a` and `b`."""
    check = LogProbCheck(limit)
    for _ in range(MIN_STEPS):
        check.judge([found("a", NOISE), found("b", NOISE)])
    return check


def test_a_server_beyond_the_configured_limit_disagrees_at_once_and_the_others_do_not() -> None:
    verdicts = LogProbCheck(0.1).judge([found("a", NOISE), found("b", 0.2)])
    assert verdicts["a"].agrees and not verdicts["a"].disagrees
    assert verdicts["b"] == ServerVerdict("b", 0.2, 0.1, agrees=False, disagrees=True, is_beyond=True)


def test_a_few_tokens_are_not_enough_to_disagree_at_once() -> None:
    check = LogProbCheck(0.1)
    verdicts = [check.judge([found("a", 0.2, num_tokens=3)])["a"] for _ in range(STRIKES)]
    assert [verdict.disagrees for verdict in verdicts] == [False] * (STRIKES - 1) + [True]
    assert not any(verdict.agrees for verdict in verdicts)


@pytest.mark.parametrize("growth", [0.002, 0.02])
def test_a_server_that_stays_at_an_old_version_is_found_long_before_the_configured_limit(growth: float) -> None:
    """Its difference grows with every step of training that it misses."""
    check = settled()
    for missed in range(1, 20):
        verdicts = check.judge([found("a", NOISE), found("b", missed * growth)])
        assert verdicts["a"].agrees
        if verdicts["b"].disagrees:
            break
    assert missed <= STRIKES and not verdicts["b"].is_beyond


def test_the_only_server_is_found_too_even_if_it_never_had_an_update() -> None:
    """What is usual is learned from differences that grow from the first step on."""
    check = LogProbCheck(0.5)
    verdicts = [check.judge([found("a", missed * 0.01)])["a"] for missed in range(12)]
    assert [verdict.disagrees for verdict in verdicts].index(True) <= MIN_STEPS + STRIKES
    assert not any(verdict.is_beyond for verdict in verdicts)


def test_tokens_of_older_versions_may_differ_by_as_much_as_the_policy_has_moved() -> None:
    check = settled()
    for _ in range(6):
        check.add_drift(0.03)
        verdicts = check.judge([found("a", 0.03, staleness=1), found("b", 0.06, staleness=2)])
        assert all(verdict.agrees for verdict in verdicts.values()), verdicts
    frozen = [check.judge([found("a", 0.03, staleness=1), found("b", 0.15 + 0.03 * n, staleness=1)]) for n in range(5)]
    assert all(verdicts["a"].agrees for verdicts in frozen)
    assert frozen[-1]["b"].disagrees


def test_tokens_older_than_the_known_drift_are_not_judged() -> None:
    check = LogProbCheck(0.1)
    check.add_drift(0.01)
    assert check.judge([found("a", 9.0, staleness=2)]) == {}
    assert check.judge([found("a", 9.0, staleness=1)])["a"].is_beyond
    check.forget_drift()
    assert check.judge([found("a", 9.0, staleness=1)]) == {}


def test_both_limits_allow_for_top_p() -> None:
    """With top-p 0.5 the engine's log-probs are higher by up to log 2."""
    check = settled()
    assert check.judge([found("a", 0.69, top_p=0.5)])["a"].agrees
    assert check.judge([found("a", 0.85, top_p=0.5)])["a"].is_beyond


def test_a_large_difference_that_is_usual_is_agreement() -> None:
    """As with a quantised engine, whose user has raised the limit."""
    check = LogProbCheck(0.5, "bfloat16")
    assert all(check.judge([found("a", 0.2)])["a"].agrees for _ in range(20))


def test_one_strike_is_enough_for_a_server_that_is_probed() -> None:
    assert settled().judge([found("a", 0.05)], frozenset({"a"}))["a"].disagrees
    assert not settled().judge([found("a", 0.05)])["a"].disagrees


def test_the_last_figure_is_kept_through_steps_without_one() -> None:
    check = LogProbCheck(0.1)
    assert check.last == {}
    for mismatch in (0.1, 0.05, None):
        check.remember(mismatch)
    assert check.last == {"logprob_mismatch": 0.05}


def test_the_error_has_the_numbers_of_the_servers() -> None:
    verdicts = LogProbCheck(0.1).judge([found("a", 0.2), found("b", 0.4)])
    text = str(disagreement(list(verdicts.values())))
    assert "disagree by 0.4 nats per token on the same weights, more than 0.1" in text
    assert "servers: a by 0.2, b by 0.4" in text
