"""Reward of Countdown: 1 for an expression that reaches the target with each number once, 0.1 for any other expression
in <answer> tags, and 0 for none."""

import ast
import json
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

FORMAT_SCORE = 0.1
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    found = _ANSWER.findall(solution_str)
    if not found:
        return {"score": 0.0, "pred": ""}
    text = found[-1].strip()
    wanted = json.loads(ground_truth)
    used: Counter[int] = Counter()
    try:
        value = _value(ast.parse(text, mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return {"score": FORMAT_SCORE, "pred": text[:100]}
    is_right = value == wanted["target"] and used == Counter(wanted["numbers"])
    return {"score": 1.0 if is_right else FORMAT_SCORE, "pred": text[:100]}


def _value(node: ast.expr, used: Counter[int]) -> Fraction:
    """The exact value of an expression. Counts the numbers in it. Raises ValueError for anything but arithmetic."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used[node.value] += 1
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("not arithmetic")
