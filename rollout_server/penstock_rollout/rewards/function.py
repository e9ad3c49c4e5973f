"""Reward functions with verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info)."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

RewardFunction = Callable[[str, str, Any, dict[str, Any]], Any]


def load_function(path: Path, name: str) -> RewardFunction:
    """Import `name` from a Python file of the user's."""
    if not path.is_file():
        raise ConfigError(f"reward function file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"penstock_user_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward function file {path} fails on import: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}; set its name, or rename it to compute_score")
    loaded: RewardFunction = function
    return loaded


def normalise_score(score: Any) -> tuple[float, dict[str, float]]:
    """What a function returned, as a finite number and further numbers.

    As verl takes it: a number, a mapping with `score`, or a sequence that starts with the number. Values of a mapping
    that are no finite numbers (a prediction's text, say) are left out; a score that is none raises ValueError."""
    parts: dict[str, float] = {}
    if isinstance(score, Mapping):
        if "score" not in score:
            raise ValueError("the reward function returned a mapping without `score`")
        parts = {
            str(key): float(value) for key, value in score.items() if isinstance(value, Real) and math.isfinite(value)
        }
        score = score["score"]
    elif isinstance(score, Sequence) and not isinstance(score, str) and score:
        score = score[0]
    try:
        reward = math.nan if isinstance(score, str) else float(score)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the reward function returned {type(score).__name__}, not a number") from error
    if not math.isfinite(reward):
        raise ValueError(f"the reward function returned {reward}")
    return reward, parts
