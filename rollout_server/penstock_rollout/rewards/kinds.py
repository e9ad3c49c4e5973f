"""The table of reward kinds, and the table of data sources with a built-in reward.

Every reward process imports this module, so it stays light: what a kind imports is imported when the kind is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock_rollout.rewards import rules
from penstock_rollout.rewards.function import RewardFunction, load_function

Settings = dict[str, Any]
"""A reward's settings as plain data: the fields of its config model, with `timeout_s` resolved."""

DATA_SOURCES: dict[str, Settings] = {
    "gsm8k": {"kind": "gsm8k"},
    "openai/gsm8k": {"kind": "gsm8k"},
    "lighteval/MATH": {"kind": "math"},
    "DigitalLearningGmbH/MATH-lighteval": {"kind": "math"},
    "HuggingFaceH4/MATH-500": {"kind": "math"},
    "math": {"kind": "math"},
    "math_dapo": {"kind": "math"},
    "math_dapo_reasoning": {"kind": "math"},
    "aime*": {"kind": "math"},
    "numina_*": {"kind": "math"},
    "code": {"kind": "code"},
    "codecontests": {"kind": "code"},
    "apps": {"kind": "code"},
    "codeforces": {"kind": "code"},
    "taco": {"kind": "code"},
    "hiyouga/geometry3k": {"kind": "math"},
    "searchR1_*": {"kind": "search_qa"},
}
"""Rewards by data source or pattern. Settings that are not given have the defaults of the kind."""

_PRIME_CODE: Settings = {"kind": "code", "compat": "verl", "max_tests": 10, "test_timeout_s": 10.0}
"""verl runs all tests, and if one fails each of the first ten. For programs that print, both come to the
share of the first ten that pass."""
VERL_DATA_SOURCES: dict[str, Settings] = DATA_SOURCES | {
    "gsm8k": {"kind": "verl", "rule": "gsm8k"},
    "openai/gsm8k": {"kind": "verl", "rule": "gsm8k"},
    "lighteval/MATH": {"kind": "verl", "rule": "math"},
    "DigitalLearningGmbH/MATH-lighteval": {"kind": "verl", "rule": "math"},
    "HuggingFaceH4/MATH-500": {"kind": "verl", "rule": "math"},
    "math": {"kind": "verl", "rule": "math_dapo"},
    "math_dapo": {"kind": "verl", "rule": "math_dapo"},
    "math_dapo_reasoning": {"kind": "verl", "rule": "math_dapo"},
    "aime*": {"kind": "verl", "rule": "math_dapo"},
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), _PRIME_CODE),
    "hiyouga/geometry3k": {"kind": "verl", "rule": "geometry3k"},
    "searchR1_*": {"kind": "verl", "rule": "search_qa"},
}
"""The same with verl's numbers, for `rollout.reward.compat: verl`."""


def _math(settings: Settings) -> RewardFunction:
    import math_verify  # noqa: F401  (takes a second, which must not count against the deadline of a sample)

    return functools.partial(rules.math, **_only(settings, "correct_score", "wrong_score"))


def _verl(settings: Settings) -> RewardFunction:
    from penstock_rollout.rewards.verl_rules import RULES

    return RULES[settings["rule"]]


def _code(settings: Settings) -> RewardFunction:
    from penstock_rollout.rewards.code import CodeReward

    return CodeReward.from_settings(settings)


def _python(settings: Settings) -> RewardFunction:
    from penstock_rollout.rewards.code import Interpreter

    return Interpreter.from_settings(settings)


def _function(settings: Settings) -> RewardFunction:
    return load_function(Path(settings["file"]), settings["name"], settings["kwargs"], is_batch=settings["batch"])


def _only(settings: Settings, *names: str) -> Settings:
    return {name: settings[name] for name in names}


BUILDERS: dict[str, Callable[[Settings], RewardFunction]] = {
    "exact_match": lambda _: rules.exact_match,
    "regex": lambda settings: functools.partial(rules.regex, **_only(settings, "pattern", "ignore_case")),
    "gsm8k": lambda settings: functools.partial(
        rules.gsm8k, **_only(settings, "method", "correct_score", "format_score")
    ),
    "math": _math,
    "search_qa": lambda _: rules.search_qa,
    "verl": _verl,
    "code": _code,
    "function": _function,
    "python": _python,
}
"""For each kind, a function that builds a reward with verl's signature from the settings. `remote` is missing because
it only waits for a service, and `reward_model` because the learner computes it. `python` is not a reward but the
built-in tool, which is called with its own arguments."""


def build(settings: Settings) -> RewardFunction:
    """Build a reward. Raises ConfigError if it cannot work on this machine."""
    return BUILDERS[settings["kind"]](settings)
