"""Reward functions with verl's signature: data_source, solution_str, ground_truth and extra_info, passed by name."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, cast

from penstock.errors import ConfigError
from penstock.reward_bounds import RANGE, is_reward
from penstock_rollout.agents.imports import load_callable

RewardFunction = Callable[..., Any]
"""Called with ARGUMENTS as keyword arguments, as verl does, so the order of its parameters does not matter."""
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_function(path: Path, name: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    """Import `name` from the user's Python file. Raises ConfigError if it does not accept ARGUMENTS and `kwargs`."""
    function: RewardFunction = load_callable(f"{path}:{name}", "reward function")
    try:
        inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*ARGUMENTS, *kwargs))
        raise ConfigError(f"{path}: {name} cannot be called with {wanted} by name: {error}") from error
    return functools.partial(function, **kwargs)


def normalise_score(score: Any) -> tuple[float, dict[str, float]]:
    """Convert the return value of a reward function to a finite score and its parts.

    Accepts the same as verl: a number, a mapping with `score`, or a sequence that starts with the number. Values of a
    mapping that are not finite numbers, such as a predicted text, are left out. Raises ValueError if the score itself
    is not a number that can be trained on."""
    parts: dict[str, float] = {}
    if isinstance(score, Mapping):
        if "score" not in score:
            raise ValueError("the reward function returned a mapping without `score`")
        parts = {
            str(key): float(value)
            for key, value in score.items()
            if isinstance(value, Real) and is_reward(cast(float, value))
        }
        score = score["score"]
    elif isinstance(score, Sequence) and not isinstance(score, str) and score:
        score = score[0]
    try:
        reward = math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the reward function returned {type(score).__name__}, not a number") from error
    if not is_reward(reward):
        raise ValueError(f"the reward function returned {reward:g}, which is not a number {RANGE}")
    return reward, parts
