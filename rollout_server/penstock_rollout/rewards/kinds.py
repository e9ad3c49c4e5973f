"""The table of reward kinds, and the table of data sources with a built-in reward.

Every reward process imports this module, so it stays light: what a kind imports is imported when the kind is built.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from penstock_rollout.rewards import rules
from penstock_rollout.rewards.function import RewardFunction, load_function

Settings = dict[str, Any]
"""A reward's settings as plain data: the fields of its config model, with `timeout_s` resolved."""

_GSM8K = ("gsm8k", "openai/gsm8k")
_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math", "math_dapo", "math_dapo_reasoning", "aime*")
_CODE = ("codecontests", "apps", "codeforces", "taco")
_GEOMETRY, _SEARCH = ("hiyouga/geometry3k",), ("searchR1_*",)

DATA_SOURCES: dict[str, Settings] = {
    **dict.fromkeys(_GSM8K, {"kind": "gsm8k"}),
    **dict.fromkeys((*_MATH, *_DAPO, "numina_*", *_GEOMETRY), {"kind": "math"}),
    **dict.fromkeys(("code", *_CODE), {"kind": "code"}),
    **dict.fromkeys(_SEARCH, {"kind": "search_qa"}),
}
"""Rewards by data source or pattern. Settings that are not given have the defaults of the kind."""

_PRIME_CODE: Settings = {"kind": "code", "compat": "verl", "max_tests": 10, "test_timeout_s": 10.0}
"""verl runs all tests, and if one fails each of the first ten. For programs that print, both come to the
share of the first ten that pass."""
_VERL_RULES = {"gsm8k": _GSM8K, "math": _MATH, "math_dapo": _DAPO, "geometry3k": _GEOMETRY, "search_qa": _SEARCH}
VERL_DATA_SOURCES: dict[str, Settings] = {
    **DATA_SOURCES,
    **{source: {"kind": "verl", "rule": rule} for rule, sources in _VERL_RULES.items() for source in sources},
    **dict.fromkeys(_CODE, _PRIME_CODE),
}
"""The same with verl's numbers, for `rollout.reward.compat: verl`."""


_RULES: dict[str, tuple[RewardFunction, tuple[str, ...]]] = {
    "exact_match": (rules.exact_match, ()),
    "regex": (rules.regex, ("pattern", "ignore_case")),
    "gsm8k": (rules.gsm8k, ("method", "correct_score", "format_score")),
    "math": (rules.math, ("correct_score", "wrong_score")),
    "search_qa": (rules.search_qa, ()),
}
"""For each kind that is a function, the function and those of its arguments that are settings."""


def build(settings: Settings) -> RewardFunction:
    """Build a reward with verl's signature. Raises ConfigError if it cannot work on this machine.

    There is no `remote`, because it only waits for a service, and no `reward_model`, because the learner computes it.
    `python` is not a reward but the built-in tool, which is called with its own arguments."""
    match settings["kind"]:
        case "verl":
            from penstock_rollout.rewards.verl_rules import RULES

            return RULES[settings["rule"]]
        case "code" | "python" as kind:
            from penstock_rollout.rewards.code import CodeReward, Interpreter

            return (CodeReward if kind == "code" else Interpreter).from_settings(settings)
        case "function":
            file, is_batch = Path(settings["file"]), settings["batch"]
            return load_function(file, settings["name"], settings["kwargs"], is_batch=is_batch)
        case kind:
            if kind == "math":
                import math_verify  # noqa: F401  (takes a second, which must not count against a sample's deadline)
            function, names = _RULES[kind]
            return functools.partial(function, **{name: settings[name] for name in names})
