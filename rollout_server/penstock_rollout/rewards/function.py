"""Reward functions with verl's signature: data_source, solution_str, ground_truth and extra_info, passed by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.reward_bounds import RANGE, is_reward
from penstock.user_code import load_callable
from penstock_rollout.rewards.placed_scores import KINDS, read_placed

RewardFunction = Callable[..., Any]
"""Called with ARGUMENTS as keyword arguments, as verl does, so the order of its parameters does not matter."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
"""The arguments of a function that scores all samples of a prompt at once. Each is a list."""


class WrongScore(ValueError):
    """What a reward function returned is not a score. The message says it all: no traceback leads to the function."""


def load_function(path: Path, name: str, kwargs: Mapping[str, Any], *, is_batch: bool = False) -> RewardFunction:
    """Import `name` from the user's Python file: a function, or a class whose object is called.

    Raises ConfigError if it does not accept the arguments and `kwargs`."""
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


def predicted_answer(score: Any) -> str | None:
    """The answer that a reward function has read from the response: `pred` of the mapping that it returned, if it is a
    text. Validations take the majority of these answers."""
    found = score.get("pred") if isinstance(score, Mapping) else None
    return found if isinstance(found, str) else None


def _plain(value: Any) -> Any:
    """The Python number in a 0-d array or tensor, such as numpy's bool, which is no number for Python."""
    return value.item() if getattr(value, "shape", None) == () else value


def normalise_score(score: Any) -> tuple[float, dict[str, float]]:
    """Convert the return value of a reward function to a finite score and its parts.

    Accepts the same as verl: a number, a mapping with `score`, or a sequence that starts with the number. The scores of
    turns, tokens and places of the text in a mapping are added. Other values that are not finite numbers are left
    out, for example a predicted text. Raises WrongScore if the score itself is not a number that can be trained on."""
    parts: dict[str, float] = {}
    placed = sum(one.score for one in read_placed(score))
    if isinstance(score, Mapping):
        if "score" not in score and not any(key in score for key in KINDS):
            raise WrongScore("the reward function returned a mapping without `score`")
        parts = {
            str(key): float(value)
            for key, value in ((key, _plain(value)) for key, value in score.items())
            if isinstance(value, Real) and is_reward(cast(float, value))
        }
        score = score.get("score", 0.0)
    elif isinstance(score, Sequence) and not isinstance(score, str) and score:
        score = score[0]
    if score is None:
        raise WrongScore("the reward function returned None, not a number; it may lack a `return` at one of its ends")
    if isinstance(score, str):
        raise WrongScore(f"the reward function returned the text {score[:40]!r}, not a number")
    try:
        reward = float(score) + placed
    except (TypeError, ValueError, OverflowError) as error:
        raise WrongScore(f"the reward function returned a {type(score).__name__}, not a number") from error
    if not is_reward(reward):
        raise WrongScore(f"the reward function returned {reward:g}, which is not a number {RANGE}")
    return reward, parts
