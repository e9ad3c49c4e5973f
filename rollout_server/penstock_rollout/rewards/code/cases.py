"""Test cases of a code reward, read from a ground truth.

A ground truth is an object or its JSON text:

    {"inputs": [...], "outputs": [...]}                   programs that read standard input and print
    {"inputs": [...], "outputs": [...], "fn_name": "f"}   calls of a function, or of a method of `Solution`
    {"assert_case": ["assert f(1) == 2", ...]}            statements, one test each; a plain list means the same
    {"functional": "def check(): ..."}                    test code, one test; text that is not JSON means the same

Expected outputs never enter the sandbox; they are compared outside. Asserts have to run in the same process as the
program, so a program that is written to forge their result can do so. A program that only exits early or swallows
exceptions does not pass.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock_rollout.rewards.code.comparison import same_text, same_value, verl_same_text, verl_same_value

SOLUTION_FILE, DRIVER_FILE = "solution.py", "driver.py"
DRIVER = """\
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
request = json.loads(sys.stdin.buffer.readline())
names = {"__name__": "solution"}
exec(compile(open("solution.py").read(), "solution.py", "exec"), names)
if "tests" in request:
    exec(compile(request["tests"], "tests.py", "exec"), names)
    answers.write(request["token"])
else:
    function = names.get(request["function"]) or getattr(names["Solution"](), request["function"])
    json.dump(function(*request["arguments"]), answers)
answers.flush()
"""
"""Calls the solution inside the sandbox. The solution's own output goes to standard error. Only the returned value, or
the token of a passed assert, goes to standard output."""


class Case(Protocol):
    """One test of a program."""

    def command(self) -> tuple[str, bytes]:
        """The file to run, and its standard input."""
        ...

    def accepts(self, stdout: bytes) -> bool:
        """Whether a program that exited with code 0 and printed `stdout` passes."""
        ...


@dataclass(frozen=True)
class PrintCase:
    """The program reads `given` and must print `expected`."""

    given: str
    expected: str
    like_verl: bool = False

    def command(self) -> tuple[str, bytes]:
        return SOLUTION_FILE, self.given.encode()

    def accepts(self, stdout: bytes) -> bool:
        compare = verl_same_text if self.like_verl else same_text
        return compare(stdout.decode(errors="replace"), self.expected)


@dataclass(frozen=True)
class CallCase:
    """The function, called with `arguments`, must return `expected`."""

    function: str
    arguments: list[Any]
    expected: Any
    like_verl: bool = False

    def command(self) -> tuple[str, bytes]:
        return DRIVER_FILE, json.dumps({"function": self.function, "arguments": self.arguments}).encode() + b"\n"

    def accepts(self, stdout: bytes) -> bool:
        try:
            returned = json.loads(stdout)
        except ValueError:
            return False
        if self.like_verl:
            return verl_same_value(returned, self.expected)
        # APPS wraps the single returned value in a list.
        is_wrapped = isinstance(self.expected, list) and len(self.expected) == 1
        return same_value(returned, self.expected) or (is_wrapped and same_value(returned, self.expected[0]))


@dataclass(frozen=True)
class AssertCase:
    """The test code must run to its end. The driver then prints `token`, so a program that just exits does not pass."""

    code: str
    token: str

    def command(self) -> tuple[str, bytes]:
        return DRIVER_FILE, json.dumps({"tests": self.code, "token": self.token}).encode() + b"\n"

    def accepts(self, stdout: bytes) -> bool:
        return stdout == self.token.encode()


def read_cases(ground_truth: Any, *, like_verl: bool = False) -> Sequence[Case]:
    """The test cases of a ground truth, whose outputs are compared as verl does if `like_verl`. Raises ValueError if it
    has none of the known shapes."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            return [_assert_case(ground_truth)]
    cases: list[Case] = []
    match ground_truth:
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            if len(inputs) != len(outputs):
                raise ValueError(
                    f"the ground truth has {len(inputs)} inputs but {len(outputs)} outputs; give each test both"
                )
            function = ground_truth.get("fn_name")
            for given, expected in zip(inputs, outputs, strict=True):
                if function:
                    cases.append(CallCase(function, _arguments(given), _value(expected), like_verl))
                else:
                    cases.append(PrintCase(_text(given), _text(expected), like_verl))
        case {"assert_case": [*statements]}:
            cases += [_assert_case(statement) for statement in statements]
        case {"functional": str(code)}:
            cases.append(_assert_case(code))
        case [str(), *_]:
            cases += [_assert_case(statement) for statement in ground_truth]
    if not cases:
        raise ValueError("the ground truth has no tests; it needs inputs and outputs, assert_case or functional")
    return cases


def _assert_case(code: str) -> AssertCase:
    return AssertCase(str(code), secrets.token_hex(16))


def _arguments(given: Any) -> list[Any]:
    """A list holds the arguments. Text holds one argument per line, as JSON."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines()]
    return given if isinstance(given, list) else [given]


def _value(text: Any) -> Any:
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)
