"""Open breakers, as operators see them. replay/lua/prelude_breaker.lua describes when a breaker opens and closes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenBreaker:
    """An open breaker, as operators see it."""

    server_id: str
    reason: str
    """Reason of the newest failure."""
    num_failures: int
    """Leases that failed since the server's last success."""
    open_s: float
    """Seconds since it opened."""
    probe_in_s: float
    """Seconds until the next probe."""

    @classmethod
    def read(cls, server_id: str, record: Mapping[str, float | str], now_ms: int) -> OpenBreaker | None:
        """Read what replay/lua/prelude_breaker.lua stored; None for a closed breaker."""
        opened_ms = int(record["opened_ms"])
        if not opened_ms:
            return None
        open_s, probe_in_s = (now_ms - opened_ms) / 1000, (int(record["probe_ms"]) - now_ms) / 1000
        return cls(server_id, str(record["reason"]), int(record["failures"]), max(0.0, open_s), max(0.0, probe_in_s))
