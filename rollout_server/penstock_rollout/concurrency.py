"""How many groups a server works on at once, from what its engine says. A pure state machine: no clock, no I/O.

A request that waits inside the engine makes no tokens, but its prompt is leased, ages, and is lost with the server. So
the limit follows what the engine can take:

- requests wait and the KV cache is full, or they wait for `max_queue_s` without a break: the limit falls by the share
  of requests that wait, at most to half. It falls again only when the engine has had `max_queue_s` to show the effect;
- nothing waits, the cache has room, and the limit is what holds groups back: it rises by one a second.

A limit that never binds never moves, and an engine where nothing waits is never held back.
"""

from __future__ import annotations

import math

from penstock.config.agents import AdaptiveConcurrencyConfig
from penstock_rollout.engines.engine import EngineStats

OBSERVE_S = 1.0
RISE = 1
LEAST_SHARE = 0.5


class ConcurrencyLimit:
    """`limit` is between 1 and `maximum`, where it starts. Times are of any monotonic clock, in seconds."""

    def __init__(self, config: AdaptiveConcurrencyConfig, maximum: int) -> None:
        self.config = config
        self.maximum = maximum
        self.limit = maximum
        self._observed_at = -math.inf
        self._waiting_since = math.inf
        self._fell_at = -math.inf

    def observe(self, now_s: float, stats: EngineStats, running_groups: int) -> int:
        """Take a look at the engine, at most once in OBSERVE_S; returns the limit."""
        if not self.config.enabled or now_s - self._observed_at < OBSERVE_S:
            return self.limit
        self._observed_at = now_s
        if not stats.waiting_requests:
            self._waiting_since = math.inf
            if running_groups >= self.limit and stats.kv_cache_usage < self.config.max_kv_usage:
                self.limit = min(self.maximum, self.limit + RISE)
            return self.limit
        self._waiting_since = min(self._waiting_since, now_s)
        has_queued = now_s - self._waiting_since >= self.config.max_queue_s
        is_full = stats.kv_cache_usage >= self.config.max_kv_usage
        if (has_queued or is_full) and now_s - self._fell_at >= self.config.max_queue_s:
            self._fall(now_s, stats, running_groups)
        return self.limit

    def _fall(self, now_s: float, stats: EngineStats, running_groups: int) -> None:
        share = stats.running_requests / (stats.running_requests + stats.waiting_requests)
        groups = min(self.limit, max(1, running_groups))
        self.limit = max(1, math.ceil(groups * max(share, LEAST_SHARE)))
        self._fell_at = now_s
