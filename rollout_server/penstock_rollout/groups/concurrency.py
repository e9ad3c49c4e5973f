"""How many groups a server works on at once, from what its engine says. A pure state machine: no clock, no I/O.

A request that waits inside the engine makes no tokens, but its prompt is leased, ages, and is lost with the server. But
the samples of a group end one by one and its place is free only when the last has: an engine where nothing waits has
idle rows by the next moment. So some may wait, RESERVE for each one that runs, and the limit follows what the engine
can take beyond that:

- requests wait and the KV cache is full, where running ones are preempted: the limit falls by the share that waits;
- more than the reserve wait for `max_queue_s` without a break: it falls by the share that is too many;
- less than half the reserve waits, the cache has room, and the limit is what holds groups back: it rises, by a
  sixteenth a second, and by a quarter while nothing waits at all.

The last is for what follows a burst. Groups that start together have all their samples before the engine, twice as many
as they have later on average; a limit that fell by that is too low once they have spread, and rows stand idle.

It falls to half at most, and again only when the engine has had `max_queue_s` to show the effect. A limit that never
binds never moves, and an engine whose reserve is not filled is never held back.
"""

from __future__ import annotations

import math

from penstock.config.agents import AdaptiveConcurrencyConfig
from penstock_rollout.engines.engine import EngineStats

OBSERVE_S = 1.0
RISE = 1 / 16
RISE_FROM_IDLE = 1 / 4
LEAST_SHARE = 0.5
RESERVE = 0.5


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
