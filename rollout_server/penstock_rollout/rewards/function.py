"""Reward functions with verl's signature: data_source, solution_str, ground_truth and extra_info, passed by name.

A function returns a number, or a mapping in which it may also score parts of the response:

    {"score": 1.0,
     "turn_scores": [0.1, -0.2],              one number per turn of the assistant
     "token_scores": [0.0, 0.0, 0.5],         one number per token, or {token: score}
     "text_scores": [[41, 0.5], [97, -1.0]]}  [character of solution_str, score], or {character: score}

All of them are part of the sample's reward, which is their sum with `score`; `score` may be omitted. Advantage
estimation credits each at its token, and the rest of the reward at the last one.

The tables of kinds and of data sources say which function scores what. Every reward process imports this file, so it
stays light: what a kind imports is imported when the kind is built.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, cast

from penstock.errors import ConfigError
from penstock.reward_bounds import RANGE, is_reward
from penstock.user_code import load_callable
from penstock_rollout.rewards import rules

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
    """The scores by the index of their token in a sample. The scored text begins with token `start`; `text_length(n)`
    is the number of characters of its first n tokens. A place in what the model did not write counts for the token that
    it wrote last before. Places after the end, and turns after the last one, count for the last token."""
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


class SampleScore(NamedTuple):
    """What a scorer says about one response."""

    reward: float
    parts: dict[str, float]
    failed: bool = False
    """Whether the reward could not be computed, so that `reward` is `rollout.reward.error_value`."""
    answer: str | None = None
    """The answer that the reward function has read from the response; None if it does not say."""
    placed: tuple[PlacedScore, ...] = ()
    """Scores of turns, tokens and places of the text. They are part of `reward`."""


RewardFunction = Callable[..., Any]
"""Called with ARGUMENTS as keyword arguments, as verl does, so the order of its parameters does not matter."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of a function that scores all samples of a prompt at once. Each is a list."""


class WrongScore(ValueError):
    """What a reward function returned is not a score. The message says it all: no traceback leads to the function."""


def load_function(path: Path, name: str, kwargs: Mapping[str, Any], *, is_batch: bool = False) -> RewardFunction:
    """Import `name` from the user's Python file: a function, or a class whose object is called. Raises ConfigError if
    it does not accept the arguments and `kwargs`."""
    function: Any = load_callable(f"{path}:{name}", "reward function")
    if inspect.isclass(function):
        _check_call(function, (), kwargs, f"{path}: {name}")
        function, kwargs = function(**kwargs), {}
        if not callable(function):
            raise ConfigError(f"{path}: objects of {name} cannot be called; give the class a __call__")
    _check_call(function, BATCH_ARGUMENTS if is_batch else ARGUMENTS, kwargs, f"{path}: {name}")
    return functools.partial(function, **kwargs)


def _check_call(function: RewardFunction, names: Sequence[str], kwargs: Mapping[str, Any], where: str) -> None:
    try:
        inspect.signature(function).bind(**dict.fromkeys(names), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*names, *kwargs)) or "no arguments"
        raise ConfigError(f"{where} cannot be called with {wanted} by name: {error}") from error


def _plain(value: Any) -> Any:
    """The Python number in a 0-d array or tensor, such as numpy's bool, which is not a number for Python."""
    return value.item() if getattr(value, "shape", None) == () else value


def read_score(score: Any) -> SampleScore:
    """The finite score of one response and its parts, from what a reward function or service returned. Accepts the same
    as verl: a number, a mapping with `score`, or a sequence that starts with the number. The scores of turns, tokens
    and places of the text in a mapping are added. Other values that are not finite numbers are skipped. The answer is
    `pred`, if that is a text; validations take the majority of these answers. Raises ValueError, which is a WrongScore
    if the score itself is not a number that can be trained on."""
    parts: dict[str, float] = {}
    answer: str | None = None
    placed = read_placed(score)
    if isinstance(score, Mapping):
        if "score" not in score and not any(key in score for key in KINDS):
            raise WrongScore("the reward function returned a mapping without `score`")
        parts = {
            str(key): float(value)
            for key, value in ((key, _plain(value)) for key, value in score.items())
            if isinstance(value, Real) and is_reward(cast(float, value))
        }
        answer = found if isinstance(found := score.get("pred"), str) else None
        score = score.get("score", 0.0)
    elif isinstance(score, Sequence) and not isinstance(score, str) and score:
        score = score[0]
    if score is None:
        raise WrongScore("the reward function returned None, not a number; it may lack a `return` at one of its ends")
    if isinstance(score, str):
        raise WrongScore(f"the reward function returned the text {score[:40]!r}, not a number")
    try:
        reward = float(score) + sum(one.score for one in placed)
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongScore(f"the reward function returned a {type(score).__name__}, not a number") from error
    if not is_reward(reward):
        raise WrongScore(f"the reward function returned {reward:g}, which is not a number {RANGE}")
    return SampleScore(reward, parts, answer=answer, placed=tuple(placed))


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
"""For each kind that is a function, the function and the arguments of it that are settings."""


def build(settings: Settings) -> RewardFunction:
    """Build a reward with verl's signature. Raises ConfigError if it cannot work on this machine. There is no `remote`,
    because it only waits for a service, and no `reward_model`, because the learner computes it. `python` is not a
    reward but the built-in tool, which is called with its own arguments."""
    match settings["kind"]:
        case "verl":
            from penstock_rollout.rewards.verl_rules import RULES

            return RULES[settings["rule"]]
        case "code" | "python" as kind:
            from penstock_rollout.rewards.code import Interpreter, ProgramReward

            return (ProgramReward if kind == "code" else Interpreter).from_settings(settings)
        case "function":
            file, is_batch = Path(settings["file"]), settings["batch"]
            return load_function(file, settings["name"], settings["kwargs"], is_batch=is_batch)
        case kind:
            if kind == "math":
                import math_verify  # noqa: F401  (takes a second, which must not count against a sample's deadline)
            function, names = _RULES[kind]
            return functools.partial(function, **{name: settings[name] for name in names})
