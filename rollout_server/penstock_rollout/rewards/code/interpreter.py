"""Runs a program of the model and returns what it printed, for the built-in `python` tool."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from penstock_rollout.rewards.code.reward import extract_program
from penstock_rollout.rewards.sandbox.limits import Limits
from penstock_rollout.rewards.sandbox.program_io import Outcome
from penstock_rollout.rewards.sandbox.run import Sandbox

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
    """Runs programs with the settings of `penstock.config.tools.PythonTool`."""

    sandbox: Sandbox
    limits: Limits
    timeout_s: float
    output_bytes: int

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Interpreter:
        limits = Limits(
            cpu_s=math.ceil(settings["timeout_s"]),
            memory_bytes=settings["memory_bytes"],
            file_bytes=settings["file_bytes"],
            folder_bytes=settings["folder_bytes"],
            max_processes=settings["max_processes"],
        )
        sandbox = Sandbox.open(settings["confinement"], allow_unisolated=settings["allow_unisolated"])
        return cls(sandbox, limits, settings["timeout_s"], settings["output_bytes"])

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
        }
        if outcome.ended != "itself":
            return f"Error: the program {reasons[outcome.ended]} and was ended"
        return "" if outcome.error_tail else f"Error: the program ended with code {outcome.exit_code}"
