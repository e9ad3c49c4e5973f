"""Programs against tests. Every test runs the program anew, in a sandbox.

Ground truths, as an object or as its JSON text:

    {"inputs": [...], "outputs": [...]}                   programs that read standard input and print
    {"inputs": [...], "outputs": [...], "fn_name": "f"}   calls of a function, or of a method of `Solution`
    {"assert_case": ["assert f(1) == 2", ...]}            statements, each a test; a plain list of them means the same
    {"functional": "def check(): ..."}                    test code, one test; plain text that is no JSON means the same

Expected outputs never enter the sandbox: what the program answers is compared out here. Asserts do run beside the
program, and a program written to cheat them can; one that only exits early or swallows exceptions cannot.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock_rollout.rewards.sandbox.confinement import Limits
from penstock_rollout.rewards.sandbox.run import Sandbox, private_folder

_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-6, 1e-9
SOLUTION_FILE, DRIVER_FILE = "solution.py", "driver.py"
_LEFT_FOR_ANSWERING_S = 2.0

_DRIVER = """\
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
"""What the program prints goes to standard error; the answer alone to standard output."""


class Test(Protocol):
    def command(self) -> tuple[str, bytes]:
        """The file to run, and its standard input."""
        ...

    def accepts(self, stdout: bytes) -> bool:
        """Whether a program that exited with code 0 and printed this has passed."""
        ...


@dataclass(frozen=True)
class PrintTest:
    given: str
    expected: str

    def command(self) -> tuple[str, bytes]:
        return SOLUTION_FILE, self.given.encode()

    def accepts(self, stdout: bytes) -> bool:
        return same_text(stdout.decode(errors="replace"), self.expected)


@dataclass(frozen=True)
class CallTest:
    function: str
    arguments: list[Any]
    expected: Any

    def command(self) -> tuple[str, bytes]:
        return DRIVER_FILE, json.dumps({"function": self.function, "arguments": self.arguments}).encode() + b"\n"

    def accepts(self, stdout: bytes) -> bool:
        try:
            answer = json.loads(stdout)
        except ValueError:
            return False
        # APPS wraps the one value of a call into a list.
        is_wrapped = isinstance(self.expected, list) and len(self.expected) == 1
        return same_value(answer, self.expected) or (is_wrapped and same_value(answer, self.expected[0]))


@dataclass(frozen=True)
class AssertTest:
    code: str
    token: str

    def command(self) -> tuple[str, bytes]:
        return DRIVER_FILE, json.dumps({"tests": self.code, "token": self.token}).encode() + b"\n"

    def accepts(self, stdout: bytes) -> bool:
        return stdout == self.token.encode()


@dataclass(frozen=True)
class CodeTests:
    """A reward: the share of tests that the response's program passes."""

    sandbox: Sandbox
    limits: Limits
    partial_credit: bool
    max_tests: int | None
    test_timeout_s: float
    output_bytes: int
    budget_s: float
    """For all tests together; those it leaves no time for fail."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> CodeTests:
        test_timeout_s, timeout_s = settings["test_timeout_s"], settings["timeout_s"]
        return cls(
            sandbox=Sandbox.open(allow_unisolated=settings["allow_unisolated"]),
            limits=Limits(
                cpu_s=math.ceil(test_timeout_s),
                memory_bytes=settings["memory_bytes"],
                file_bytes=settings["file_bytes"],
                max_processes=settings["max_processes"],
            ),
            partial_credit=settings["partial_credit"],
            max_tests=settings["max_tests"],
            test_timeout_s=test_timeout_s,
            output_bytes=settings["output_bytes"],
            budget_s=max(timeout_s / 2, timeout_s - _LEFT_FOR_ANSWERING_S),
        )

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> dict[str, float]:
        tests = read_tests(ground_truth)[: self.max_tests]
        program, deadline = extract_program(solution_str), time.monotonic() + self.budget_s
        num_passed = 0
        for test in tests:
            passed = bool(program) and self._passes(program, test, deadline)
            num_passed += passed
            if not passed and (not self.partial_credit or not program):
                break
        share = num_passed / len(tests)
        score = share if self.partial_credit else float(num_passed == len(tests))
        return {"score": score, "tests_passed": num_passed, "tests_total": len(tests)}

    def _passes(self, program: str, test: Test, deadline: float) -> bool:
        wall_s = min(self.test_timeout_s, deadline - time.monotonic())
        if wall_s <= 0:
            return False
        file, stdin = test.command()
        with private_folder() as folder:
            _write(folder / SOLUTION_FILE, program)
            _write(folder / DRIVER_FILE, _DRIVER)
            outcome = self.sandbox.run(
                [file], folder, stdin, self.limits, wall_s=wall_s, output_bytes=self.output_bytes
            )
        return outcome.succeeded and test.accepts(outcome.stdout)


def extract_program(response: str) -> str:
    """The last fenced block of Python; a response without one is a program itself."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1] if blocks else response).strip()


def read_tests(ground_truth: Any) -> Sequence[Test]:
    """The tests of a ground truth; ValueError where it has none of the known shapes."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            return [_assert_test(ground_truth)]
    tests: list[Test] = []
    match ground_truth:
        case {"inputs": [*inputs], "outputs": [*outputs]}:
            if len(inputs) != len(outputs):
                raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
            function = ground_truth.get("fn_name")
            for given, expected in zip(inputs, outputs, strict=True):
                if function:
                    tests.append(CallTest(function, _arguments(given), _value(expected)))
                else:
                    tests.append(PrintTest(_text(given), _text(expected)))
        case {"assert_case": [*statements]}:
            tests += [_assert_test(statement) for statement in statements]
        case {"functional": str(code)}:
            tests.append(_assert_test(code))
        case [str(), *_]:
            tests += [_assert_test(statement) for statement in ground_truth]
    if not tests:
        raise ValueError("the ground truth holds no tests; it needs inputs and outputs, assert_case or functional")
    return tests


def same_text(printed: str, expected: str) -> bool:
    """Equal line by line and word by word; numbers with a fraction may differ by rounding."""
    lines, wanted = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted, strict=True)
    )


def same_value(answer: Any, expected: Any) -> bool:
    """Equal, with tuples as lists, which JSON makes of them; fractions may differ by rounding."""
    if isinstance(answer, float) or isinstance(expected, float):
        numbers = isinstance(answer, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(answer, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    if isinstance(answer, list) and isinstance(expected, list):
        return len(answer) == len(expected) and all(map(same_value, answer, expected))
    if isinstance(answer, dict) and isinstance(expected, dict):
        return answer.keys() == expected.keys() and all(same_value(answer[key], expected[key]) for key in answer)
    return type(answer) is type(expected) and bool(answer == expected)


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in word + expected and "e" not in (word + expected).lower():
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except ValueError:
        return False


def _assert_test(code: str) -> AssertTest:
    return AssertTest(str(code), secrets.token_hex(16))


def _arguments(given: Any) -> list[Any]:
    """A list is the arguments; text has one a line, as JSON."""
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


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")
    path.chmod(0o644)
