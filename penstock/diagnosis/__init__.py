"""What people read about a run: facts (`facts.py`) become findings (`progress.py`, `health.py`; those of machines are
in `penstock doctor`), which printers format: `terminal.py` for `penstock status`, `top` and `doctor`, `log_lines.py`
and `display.py` for `penstock up` and the demo, and the gateway, whose answers contain findings as JSON."""

from __future__ import annotations

from typing import Literal

from penstock.api.records import Finding

Level = Literal["OK", "WARN", "FAIL"]


def finding(check: str, level: Level, text: str, advice: str = "", code: str = "") -> Finding:
    return Finding(check=check, level=level, text=text, advice=advice, code=code)


def failed_rewards_finding(share: float) -> Finding:
    return finding("rewards", "FAIL", f"the reward failed on {share:.0%} of the samples of the newest step")


def paused_finding(server_id: str, num_failures: int, reason: str) -> Finding:
    text = f"{server_id} leases nothing: its last {num_failures} attempts failed, the newest with {reason}"
    return finding("leasing", "FAIL", text, "see docs/runbooks.md#leasingpaused")


def quarantine_finding(server_id: str, mismatch_nats: float, limit_nats: float, num_reloads: int) -> Finding:
    differ = f"its log-probs differ by {mismatch_nats:.3g} nats a token, more than {limit_nats:.3g}"
    text = f"{server_id} is in quarantine: {differ}; weights loaded again {num_reloads} times"
    return finding("quarantine", "FAIL", text, "see docs/runbooks.md#serverquarantined")
