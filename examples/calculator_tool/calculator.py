"""A calculator tool, and a parser of its calls for a model whose tokenizer has no letters."""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from penstock_rollout.agents.tool_calls import MalformedCall, ToolCall
from penstock_rollout.agents.tools import Tool

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
BRACKETS = re.compile(r"\[([^\[\]]*)(\]?)")


def parse_brackets(text: str) -> list[ToolCall | MalformedCall]:
    """Parse `[47+85]` as `calculator(expression="47+85")`. This tokenizer has no letters for the usual formats."""
    return [
        ToolCall("calculator", {"expression": expression}) if closed else MalformedCall("] is missing")
        for expression, closed in BRACKETS.findall(text)
    ]


class Calculator(Tool):
    """Evaluates + - * / over numbers. Each call costs `config.cost` of the reward."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str, float, dict[str, float]]:
        value = evaluate(str(parameters["expression"])[:100])
        return f"{value:g}", -float(self.config.get("cost", 0.0)), {"calls": 1}


def evaluate(expression: str) -> float:
    """The value of an expression. The model sees a ValueError, ZeroDivisionError or SyntaxError as the result."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    raise ValueError("only numbers and + - * / can be evaluated")
