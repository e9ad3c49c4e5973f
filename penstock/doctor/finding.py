"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report. `check` names what was examined, for example `redis` or `ports`."""

    check: str
    level: Level
    text: str
    advice: str = ""
    """What to do about it; empty if there is nothing to do."""
