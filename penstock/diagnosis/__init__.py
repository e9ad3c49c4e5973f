"""What people read about a run: facts (`facts.py`) become findings (`progress.py`, `servers.py`, `health.py`), which
printers format: `terminal.py` for `penstock status`, `top` and `doctor`, `log_lines.py` and `display.py` for `penstock
up` and the demo, and the gateway, whose answers contain findings as JSON."""

from __future__ import annotations

from typing import Literal

from penstock.api.records import Finding

Level = Literal["OK", "WARN", "FAIL"]


def finding(check: str, level: Level, text: str, advice: str = "", code: str = "") -> Finding:
    return Finding(check=check, level=level, text=text, advice=advice, code=code)
