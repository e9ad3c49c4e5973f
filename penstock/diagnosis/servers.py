"""Findings about one rollout server. They need its numbers alone, from Redis or from the API."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.api.records import Finding, Server
from penstock.diagnosis import finding


def paused_finding(server_id: str, num_failures: int, reason: str) -> Finding:
    text = f"{server_id} leases nothing: its last {num_failures} attempts failed, the newest with {reason}"
    return finding("leasing", "FAIL", text, "see docs/runbooks.md#leasingpaused")


def quarantine_finding(server_id: str, mismatch_nats: float, limit_nats: float, num_reloads: int) -> Finding:
    differ = f"its log-probs differ by {mismatch_nats:.3g} nats a token, more than {limit_nats:.3g}"
    text = f"{server_id} is in quarantine: {differ}; weights loaded again {num_reloads} times"
    return finding("quarantine", "FAIL", text, "see docs/runbooks.md#serverquarantined")


def server_findings(servers: Iterable[Server]) -> list[Finding]:
    """A finding for each server whose breaker is open, and then for each in quarantine."""
    paused = [s for s in servers if s.breaker_reason]
    apart = [s for s in servers if s.is_quarantined]
    return [
        *(paused_finding(s.server_id, s.breaker_failures, s.breaker_reason) for s in paused),
        *(quarantine_finding(s.server_id, s.logprob_mismatch_nats, s.logprob_limit_nats, s.num_reloads) for s in apart),
    ]
