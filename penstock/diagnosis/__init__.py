"""What people read about a run: facts (`facts.py`) become findings (`progress.py`), and printers format them: a
terminal (`terminal.py`), the gateway, whose answers contain findings as JSON, `penstock up` and `penstock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One judgement about a run or a deployment, in one line."""

    check: str
    """What was examined, for example `redis`, `learning` or `ports`."""
    level: Level
    text: str
    """The judgement, with the numbers behind it."""
    advice: str = ""
    """What to do about it; empty if there is nothing to do."""
    code: str = ""
    """The cause in one word, for programs. Only the findings of `progress.py` have one."""

    @property
    def line(self) -> str:
        return f"{self.text}; {self.advice}" if self.advice else self.text
