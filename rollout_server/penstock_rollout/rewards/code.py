"""Programs that a model wrote: the code reward runs one against the tests of a ground truth, each in a new sandbox, and
the built-in `python` tool returns what one printed.

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
import math
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_rollout.rewards.sandbox.program import Limits, Outcome
from penstock_rollout.rewards.sandbox.run import Sandbox

_RELATIVE_TOLERANCE, _ABSOLUTE_TOLERANCE = 1e-6, 1e-9
_VERL_RELATIVE, _VERL_ABSOLUTE = 1e-5, 1e-8


def same_text(printed: str, expected: str) -> bool:
    """Compare line by line and word by word. Integers must be equal; numbers with a fraction may differ by rounding."""
    lines, wanted = [[line.split() for line in text.strip().splitlines()] for text in (printed, expected)]
    return len(lines) == len(wanted) and all(
        len(words) == len(others) and all(map(_same_word, words, others))
        for words, others in zip(lines, wanted, strict=True)
    )


def same_value(returned: Any, expected: Any) -> bool:
    """Compare JSON values. Tuples compare as lists, because JSON turns them into lists."""
    if isinstance(returned, float) or isinstance(expected, float):
        numbers = isinstance(returned, int | float) and isinstance(expected, int | float)
        return numbers and math.isclose(returned, expected, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(same_value, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(same_value(returned[key], expected[key]) for key in returned)
    return type(returned) is type(expected) and bool(returned == expected)


def verl_same_text(printed: str, expected: str) -> bool:
    """Compare as verl does: the texts without surrounding white space, then the lines without empty ones. Numbers may
    differ by rounding if every line is one number."""
    lines = printed.splitlines()
    if expected.strip() in ("\n".join(lines).strip(), "\n".join(line.strip() for line in lines).strip()):
        return True
    filled, wanted = [line for line in lines if line], [line.strip() for line in expected.split("\n") if line]
    if wanted in (lines, filled):
        return True
    if len(filled) != len(wanted) or all(word.isdigit() for word in (*filled, *wanted)):
        return False
    try:
        numbers = [(float(line), float(other)) for line, other in zip(filled, wanted, strict=True)]
    except ValueError:
        return False
    return all(abs(given - right) <= _VERL_ABSOLUTE + _VERL_RELATIVE * abs(right) for given, right in numbers)


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "." not in word + expected and "e" not in (word + expected).lower():
        return False
    try:
        return math.isclose(float(word), float(expected), rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except ValueError:
        return False


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
        wanted = [self.expected]
        # APPS wraps the single returned value in a list. verl compares exactly, also with the first of several.
        if isinstance(self.expected, list) and self.expected and (self.like_verl or len(self.expected) == 1):
            wanted.append(self.expected[0])
        return any(returned == value if self.like_verl else same_value(returned, value) for value in wanted)


@dataclass(frozen=True)
class AssertCase:
    """The test code must run to its end. The driver then prints `token`, so a program that just exits does not pass."""

    code: str
    token: str = field(default_factory=lambda: secrets.token_hex(16))

    def command(self) -> tuple[str, bytes]:
        return DRIVER_FILE, json.dumps({"tests": self.code, "token": self.token}).encode() + b"\n"

    def accepts(self, stdout: bytes) -> bool:
        return stdout == self.token.encode()


Case = PrintCase | CallCase | AssertCase
"""One test of a program: the file to run with its standard input, and whether a program that exited with code 0 and
printed `stdout` passes."""


def read_cases(ground_truth: Any, *, like_verl: bool = False) -> Sequence[Case]:
    """The test cases of a ground truth, whose outputs are compared as verl does if `like_verl`. Raises ValueError if it
    has none of the known shapes."""
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except ValueError:
            return [AssertCase(ground_truth)]
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
            cases += [AssertCase(str(statement)) for statement in statements]
        case {"functional": str(code)}:
            cases.append(AssertCase(code))
        case [str(), *_]:
            cases += [AssertCase(str(statement)) for statement in ground_truth]
    if not cases:
        raise ValueError("the ground truth has no tests; it needs inputs and outputs, assert_case or functional")
    return cases


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


_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_RESERVED_S = 2.0
"""Part of the reward's deadline that is kept for returning the score."""


@dataclass(frozen=True)
class ProgramReward:
    """A reward function with verl's signature."""

    sandbox: Sandbox
    limits: Limits
    partial_credit: bool
    max_tests: int | None
    test_timeout_s: float
    output_bytes: int
    budget_s: float
    """Time for all tests together. Tests that do not run within it fail."""
    like_verl: bool = False
    """Whether programs are found and outputs are compared as verl does."""

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> ProgramReward:
        test_timeout_s, timeout_s = settings["test_timeout_s"], settings["timeout_s"]
        return cls(
            sandbox=Sandbox.open(settings["confinement"], allow_unisolated=settings["allow_unisolated"]),
            limits=_limits(settings, test_timeout_s),
            partial_credit=settings["partial_credit"],
            max_tests=settings["max_tests"],
            test_timeout_s=test_timeout_s,
            output_bytes=settings["output_bytes"],
            budget_s=max(timeout_s / 2, timeout_s - _RESERVED_S),
            like_verl=settings["compat"] == "verl",
        )

    @property
    def description(self) -> str:
        return f"programs of code rewards run {self.sandbox.description}"

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> dict[str, float]:
        cases = read_cases(ground_truth, like_verl=self.like_verl)
        # verl forgets the name of the function when it runs single tests, so they fail.
        is_whole = self.like_verl and isinstance(cases[0], CallCase)
        partial_credit = self.partial_credit and not is_whole
        cases = cases if is_whole else cases[: self.max_tests]
        program = verl_program(solution_str) if self.like_verl else extract_program(solution_str)
        deadline = time.monotonic() + self.budget_s
        num_passed = 0
        for case in cases:
            passed = bool(program) and self._passes(program, case, deadline)
            num_passed += passed
            if not passed and (not partial_credit or not program):
                break
        share = num_passed / len(cases)
        score = share if partial_credit else float(num_passed == len(cases))
        return {"score": score, "tests_passed": num_passed, "tests_total": len(cases)}

    def _passes(self, program: str, case: Case, deadline: float) -> bool:
        wall_s = min(self.test_timeout_s, deadline - time.monotonic())
        if wall_s <= 0:
            return False
        file, stdin = case.command()
        files = {SOLUTION_FILE: program, DRIVER_FILE: DRIVER}
        outcome = self.sandbox.run([file], files, stdin, self.limits, wall_s=wall_s, output_bytes=self.output_bytes)
        return outcome.succeeded and case.accepts(outcome.stdout)


def _limits(settings: dict[str, Any], timeout_s: float) -> Limits:
    names = ("memory_bytes", "file_bytes", "folder_bytes", "max_processes")
    return Limits(cpu_s=math.ceil(timeout_s), **{name: settings[name] for name in names})


def extract_program(response: str) -> str:
    """The last fenced block of Python. A response without a block is a program itself."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1] if blocks else response).strip()


def verl_program(response: str) -> str:
    """The program that verl finds: the text between the last "```python" and the next fence. Without that fence, it is
    the text before the first fence. Empty if there is only white space."""
    program = response.rpartition("```python")[2].partition("```")[0]
    return program if program.strip() else ""


_DRIVER = """\
import ast, sys, traceback
try:
    tree = ast.parse(open("program.py").read(), "program.py")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    whole = compile(tree, "program.py", "exec")
    shown = compile(ast.Expression(last.value), "program.py", "eval") if last else None
except SyntaxError as error:
    sys.stderr.write("".join(traceback.format_exception_only(error)))
    sys.exit(1)
names = {"__name__": "__main__"}
try:
    exec(whole, names)
    if shown:
        sys.displayhook(eval(shown, names))
except Exception as error:
    sys.stdout.flush()
    traceback.print_exception(type(error), error, error.__traceback__.tb_next)
    sys.exit(1)
"""
"""Runs `program.py` inside the sandbox and prints the value of its last expression. Tracebacks begin in the program."""


@dataclass(frozen=True)
class Interpreter:
    """Runs programs with the settings of `penstock.config.rollout.PythonTool`."""

    sandbox: Sandbox
    limits: Limits
    timeout_s: float
    output_bytes: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Interpreter:
        timeout_s = settings["timeout_s"]
        sandbox = Sandbox.open(settings["confinement"], allow_unisolated=settings["allow_unisolated"])
        return cls(sandbox, _limits(settings, timeout_s), timeout_s, settings["output_bytes"])

    @property
    def description(self) -> str:
        return f"programs of the python tool run {self.sandbox.description}"

    def __call__(self, code: str) -> dict[str, Any]:
        """The text that the model reads, and whether the program succeeded."""
        files = {"program.py": extract_program(code), "driver.py": _DRIVER}
        outcome = self.sandbox.run(
            ["driver.py"], files, b"", self.limits, wall_s=self.timeout_s, output_bytes=self.output_bytes
        )
        return {"text": self._text(outcome), "succeeded": outcome.succeeded}

    def _text(self, outcome: Outcome) -> str:
        parts = [outcome.stdout.decode(errors="replace")]
        if not outcome.succeeded:
            parts.append(outcome.error_tail.decode(errors="replace"))
            parts.append(self._ending(outcome))
        return "\n".join(part.strip("\n") for part in parts if part.strip()) or "(no output)"

    def _ending(self, outcome: Outcome) -> str:
        """Why the program was ended. Empty if it says so itself, by a traceback."""
        reasons = {
            "deadline": f"took longer than {self.timeout_s:g} s",
            "output": f"printed more than {self.output_bytes} bytes",
            "memory": "used too much memory",
            "files": "wrote too much to its files",
            "processes": "started too many processes",
        }
        if outcome.ended != "itself":
            return f"Error: the program {reasons[outcome.ended]} and was ended"
        return "" if outcome.error_tail else f"Error: the program ended with code {outcome.exit_code}"
