"""What people read about a run: facts become findings, and printers format them.

| module | contents |
|---|---|
| `facts.py` | everything that Redis holds about a run, read once into `RunFacts`, and the state that follows from it |
| `progress.py` | findings: whether the run learns, and what it waits for |
| `run_findings.py` | findings of `penstock doctor` about a run: conservation, heartbeats, weights, rewards |
| `deployment.py` | findings of `penstock doctor` about Redis and this machine, and the whole examination |
| `terminal.py` | printer: the parts of `penstock status`, `top`, `servers` and `doctor` on a terminal |
| `log_lines.py` | printer: what is new about a run, each thing once, as lines of a log |
| `display.py` | printer: the progress of a run on this machine, as a live table or as lines |

The third printer is the gateway, whose answers contain findings as JSON.
"""

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
