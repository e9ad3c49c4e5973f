"""Finds rollout servers that hang: their process is there, but sends no heartbeat."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from penstock.api.records import Server
from penstock.config.run import RunConfig


class HungServers:
    """A server hangs if the statuses of `limit_s` in all, without one between them that differs, showed it without a
    recent heartbeat.

    The age of a heartbeat alone is not enough: after Redis was away, all of them are old for a moment. So a time
    without a status counts as `recent_s` at most. It does not begin the count again: on a busy machine a status is
    missing now and then.

    A process that is stopped, by SIGSTOP or a debugger, does nothing that it must be given time for: it hangs as soon
    as its heartbeat is no longer recent."""

    def __init__(self, recent_s: float, limit_s: float) -> None:
        self.recent_s = recent_s
        self.limit_s = limit_s
        self._looked_s = time.monotonic()
        self._silent_s: dict[str, float] = {}
        self.newly_silent: dict[str, float] = {}
        """Servers that the two newest looks have found without a recent heartbeat, and the one before them has not."""

    @classmethod
    def of(cls, config: RunConfig) -> HungServers:
        # A server that loads a snapshot sends no heartbeat meanwhile, and has `push_timeout_s` for it.
        recent_s = config.replay.lease_ttl_s
        return cls(recent_s, recent_s + config.weights.push_timeout_s)

    def look(
        self, servers: Sequence[Server] | None, may_hang: Collection[str], stopped: Collection[str] = ()
    ) -> dict[str, float]:
        """The servers that hang, with the seconds since their last heartbeat. `servers` is None if the status could
        not be read. Servers that are not in `may_hang`, because they are starting, are left alone. Those in `stopped`
        have a stopped process."""
        self.newly_silent = {}
        if servers is None:
            return {}
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, self.recent_s), now_s
        silent = {
            server.server_id: server.heartbeat_age_ms / 1000
            for server in servers
            if server.server_id in may_hang and server.heartbeat_age_ms > 1000 * self.recent_s
        }
        before = self._silent_s
        self._silent_s = {name: before[name] + passed_s if name in before else 0.0 for name in silent}
        self.newly_silent = {name: age_s for name, age_s in silent.items() if before.get(name) == 0}
        return {
            name: age_s
            for name, age_s in silent.items()
            if self._silent_s[name] > (0 if name in stopped else self.limit_s)
        }
