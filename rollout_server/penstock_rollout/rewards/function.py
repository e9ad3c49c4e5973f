"""Reward functions with verl's signature: compute_score(data_source, solution_str, ground_truth, extra_info)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError

RewardFunction = Callable[[str, str, Any, dict[str, Any]], Any]


def load_function(path: Path, name: str) -> RewardFunction:
    """Import `name` from a Python file of the user's."""
    if not path.is_file():
        raise ConfigError(f"rollout.reward.function_file {path} does not exist")
    spec = importlib.util.spec_from_file_location(f"penstock_user_reward_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"rollout.reward.function_file {path} fails on import: {error!r}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name!r}; set rollout.reward.function_name")
    loaded: RewardFunction = function
    return loaded


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 when the response is the ground truth, white space aside."""
    return float(solution_str.strip() == str(ground_truth).strip())


def normalise_score(score: Any) -> tuple[float, dict[str, float]]:
    """A function may return a number, or a mapping with `score` and further numbers, as verl's do."""
    if isinstance(score, Mapping):
        parts = {str(key): float(value) for key, value in score.items() if isinstance(value, int | float)}
        return float(score["score"]), parts
    return float(score), {}
