"""Modules with verl's names, for the time in which a user's file is imported on a machine without verl."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from penstock_rollout.agents.verl import shapes
from penstock_rollout.rewards.rules import gsm8k

_SCHEMAS = (
    "OpenAIFunctionPropertySchema", "OpenAIFunctionParametersSchema", "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema", "OpenAIFunctionParsedSchema", "OpenAIFunctionCallSchema", "OpenAIFunctionToolCall",
    "ToolResponse",
)  # fmt: skip


@contextlib.contextmanager
def verl_names() -> Iterator[None]:
    """Inside the block, `verl.tools.base_tool` and the other modules of `_modules` can be imported.

    Does nothing if verl is installed, or if another import already has its names. What a file imports later, inside a
    function, is not found."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        yield
        return
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def _modules() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.schemas": {name: getattr(shapes, name) for name in _SCHEMAS},
        "verl.tools.base_tool": {name: getattr(shapes, name) for name in ("BaseTool", "rollout_trace_op", *_SCHEMAS)},
        "verl.interactions": {},
        "verl.interactions.base": {"BaseInteraction": shapes.BaseInteraction},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": shapes.rollout_trace_op},
        "verl.utils.reward_score": {},
        "verl.utils.reward_score.gsm8k": {"compute_score": _gsm8k_score},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
        if any(other.startswith(f"{name}.") for other in contents):
            module.__path__ = []  # a package, in which nothing else is found
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def _gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return gsm8k("", solution_str, ground_truth, {}, method=method, correct_score=score, format_score=format_score)
