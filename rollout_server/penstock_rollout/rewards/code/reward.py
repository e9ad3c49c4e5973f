"""The code reward: the share of tests that a response's program passes. Every test runs it in a new sandbox."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from typing import Any

from penstock_rollout.rewards.code.cases import DRIVER, DRIVER_FILE, SOLUTION_FILE, CallCase, Case, read_cases
from penstock_rollout.rewards.sandbox.limits import Limits
from penstock_rollout.rewards.sandbox.run import Sandbox

_FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_RESERVED_S = 2.0
"""Part of the reward's deadline that is kept for returning the score."""


@dataclass(frozen=True)
class CodeReward:
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
    def from_settings(cls, settings: dict[str, Any]) -> CodeReward:
        test_timeout_s, timeout_s = settings["test_timeout_s"], settings["timeout_s"]
        return cls(
            sandbox=Sandbox.open(settings["confinement"], allow_unisolated=settings["allow_unisolated"]),
            limits=Limits(
                cpu_s=math.ceil(test_timeout_s),
                memory_bytes=settings["memory_bytes"],
                file_bytes=settings["file_bytes"],
                folder_bytes=settings["folder_bytes"],
                max_processes=settings["max_processes"],
            ),
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


def extract_program(response: str) -> str:
    """The last fenced block of Python. A response without a block is a program itself."""
    blocks = _FENCE.findall(response)
    return str(blocks[-1] if blocks else response).strip()


def verl_program(response: str) -> str:
    """The program that verl finds: the text between the last "```python" and the next fence. Without that fence, it is
    the text before the first fence. Empty if there is only white space."""
    program = response.rpartition("```python")[2].partition("```")[0]
    return program if program.strip() else ""
