"""Limits how many groups a server works on at once, according to the load of its engine.

It is a pure state machine, without a clock or I/O. A request that waits inside the engine only ages its lease. But the
samples of a group end one by one, and a new group starts only when as many samples of others have ended as it has, so
an engine without waiting requests soon has idle rows. The limit therefore lets RESERVE requests wait for each request
that runs. Beyond that it follows the load:

- It falls by the share of waiting requests if some wait and the KV cache is full: running ones are then preempted.
- It falls by the share of excess requests if more than the reserve wait for `max_queue_s` without a break.
- It rises if at most half the reserve waits, the cache has room, and as many groups run as the limit allows: by a
  sixteenth per second, or by a quarter while nothing waits. After a burst, groups that started together have twice as
  many samples in the engine as later, and the limit that fell for it is too low once they have spread out.

The limit falls by half at most, and not again until the engine has had `max_queue_s` to show the effect.
"""

from __future__ import annotations

import math

from penstock.config.rollout import AdaptiveConcurrencyConfig
from penstock_rollout.engines.engine import EngineStats

OBSERVE_S = 1.0
RISE = 1 / 16
RISE_FROM_IDLE = 1 / 4
LEAST_SHARE = 0.5
"""The limit falls at most to this share of the running groups at once."""
RESERVE = 0.5
"""Number of waiting requests, per running request, that keeps the engine full."""


class ConcurrencyLimit:
    """`limit` is between 1 and `maximum` and starts at `maximum`. Times are seconds of any monotonic clock."""

    def __init__(self, config: AdaptiveConcurrencyConfig, maximum: int) -> None:
        self.config = config
        self.maximum = maximum
        self.limit = maximum
        self._observed_at = -math.inf
        self._waiting_since = math.inf
        self._fell_at = -math.inf

    def observe(self, now_s: float, stats: EngineStats, running_groups: int) -> int:
        """Adapt the limit to the engine's load, at most once per OBSERVE_S, and return it."""
        if not self.config.enabled or now_s - self._observed_at < OBSERVE_S:
            return self.limit
        self._observed_at = now_s
        is_full = stats.waiting_requests > 0 and stats.kv_cache_usage >= self.config.max_kv_usage
        reserve = 0.0 if is_full else RESERVE * stats.running_requests
        if stats.waiting_requests <= reserve:
            self._waiting_since = math.inf
            has_room = stats.kv_cache_usage < self.config.max_kv_usage
            if stats.waiting_requests <= reserve / 2 and running_groups >= self.limit and has_room:
                rise = RISE if stats.waiting_requests else RISE_FROM_IDLE
                self.limit = min(self.maximum, self.limit + max(1, int(self.limit * rise)))
            return self.limit
        self._waiting_since = min(self._waiting_since, now_s)
        has_queued = now_s - self._waiting_since >= self.config.max_queue_s
        if (has_queued or is_full) and now_s - self._fell_at >= self.config.max_queue_s:
            wanted = stats.running_requests + reserve
            self._fall(now_s, wanted / (stats.running_requests + stats.waiting_requests), running_groups)
        return self.limit

    def _fall(self, now_s: float, share: float, running_groups: int) -> None:
        groups = min(self.limit, max(1, running_groups))
        self.limit = max(1, math.ceil(groups * max(share, LEAST_SHARE)))
        self._fell_at = now_s
