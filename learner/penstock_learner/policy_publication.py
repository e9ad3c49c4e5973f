"""Bringing versions to the fleet: after each step, and to servers that have none or an old one.

| loop            | waits for                          | unblocked by                 |
|-----------------|------------------------------------|------------------------------|
| publish(step)   | the push before it                 | the publisher's report       |
| serve_latecomers| a STALE server, every POLL_S       | the fleet registry           |

One push at a time (`_lock`); the gather of the next version waits for it too, since it reuses the buckets.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.fleet import SERVING_STATES, Fleet, ServerRecord, ServerState
from penstock.replay.contract import GroupConsumer
from penstock.v1 import policies_pb2
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.publisher import PushReport, PushTarget
from penstock_learner.role_group import RoleGroup

logger = logging.getLogger(__name__)
POLL_S = 0.5
MAX_BACKOFF_S = 60.0


class PolicyPublication:
    """Owns the order in which versions become current. `current` is the newest version that was published."""

    def __init__(
        self,
        config: RunConfig,
        queue: GroupConsumer,
        fleet: Fleet,
        policy: RoleGroup,
        term: int,
        metrics: LearnerMetrics,
    ) -> None:
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.policy = policy
        self.term = term
        self.metrics = metrics
        self.current = 0
        self.in_flight_updates = 0
        """Member commits during which requests were running."""
        self._lock = asyncio.Lock()
        self._failures: dict[str, tuple[int, float]] = {}
        """Failed pushes in a row of a server, and when it may be tried again."""

    async def gather(self, policy_version: int) -> None:
        """Collect the weights as `policy_version`. Waits for a push that still uses the buckets."""
        async with self._lock:
            await self.policy.call_all("gather_weights", policy_version, self.term)

    async def publish(self, policy_version: int, step: int, step_metrics: Mapping[str, float]) -> None:
        """Push the gathered version to every serving member, then make it the run's current one."""
        async with self._lock:
            report = await self._push(await self._reachable(("READY", "LOADING", "STALE")))
            snapshot = await self._snapshot(policy_version, step)
            record = policies_pb2.Policy(
                policy_version=policy_version,
                step=step,
                parent_version=self.current if step else None,
                published_at_ms=int(time.time() * 1000),
                weights_digest=report.weights_digest,
                snapshot_path=str(snapshot) if snapshot else "",
                state=policies_pb2.Policy.PUBLISHED,
                metrics=step_metrics,
            )
            await self.queue.publish(policy_version, step, record.SerializeToString())
            self.current = policy_version
            self.metrics.version.labels("learner").set(policy_version)

    async def serve_latecomers(self) -> None:
        """For ever: bring the current version to servers that are STALE, without disturbing the others."""
        while True:
            await asyncio.sleep(POLL_S)
            async with self._lock:
                stale = await self._reachable(("STALE",))
                behind = [server for server in stale if server.policy_version != self.current]
                if behind:
                    logger.info("bringing version %d to %s", self.current, [server.server_id for server in behind])
                    await self._push(behind)

    async def _push(self, servers: list[ServerRecord]) -> PushReport:
        """Push what is gathered. Members that fail are evicted; they come back as STALE, and wait longer each time.

        A STALE server stays so until it has loaded: LOADING is for those that serve, and go on serving."""
        for server in servers:
            if server.state == "READY":
                await self.fleet.set_state(server.server_id, "LOADING")
        targets = [PushTarget(server.server_id, server.address) for server in servers]
        weights = self.config.weights
        timeout_s = (weights.ready_timeout_s + 2 * weights.push_timeout_s) * (len(targets) + 1)
        report: PushReport = await self.policy.call_beside("push", targets, timeout_s=timeout_s)
        for server_id in report.committed:
            await self.fleet.set_state(server_id, "READY")
            self._failures.pop(server_id, None)
        for server_id, reason in report.failed.items():
            logger.warning("%s is evicted from the weight group: %s", server_id, reason)
            await self.fleet.set_state(server_id, "EVICTED")
            failures = self._failures.get(server_id, (0, 0.0))[0] + 1
            self._failures[server_id] = (failures, time.monotonic() + min(2.0**failures, MAX_BACKOFF_S))
        if report.running_requests:
            self.in_flight_updates += 1
        self.metrics.record_push(report, weights.transport)
        return report

    async def _reachable(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """Servers in one of the states, with a fresh heartbeat, that have not just failed.

        One that should serve and is silent is evicted: should it wake up, it must load before it leases again."""
        limit_ms = self.config.replay.lease_ttl_s * 1000
        reachable = []
        for server in await self.fleet.servers():
            is_silent = server.heartbeat_age_ms >= limit_ms
            if is_silent and server.state in SERVING_STATES:
                logger.warning("%s is evicted: silent for %.1f s", server.server_id, server.heartbeat_age_ms / 1000)
                await self.fleet.set_state(server.server_id, "EVICTED")
            retry_at = self._failures.get(server.server_id, (0, 0.0))[1]
            if not is_silent and server.state in states and time.monotonic() >= retry_at:
                reachable.append(server)
        return reachable

    async def _snapshot(self, policy_version: int, step: int) -> Path | None:
        if step % self.config.weights.snapshot_every_steps and step != self.config.learner.num_steps:
            return None
        folder = self.config.folder / "snapshots"
        target = folder / f"version-{policy_version:08d}"
        await self.policy.call_beside("write_snapshot", target, timeout_s=self.config.learner.rank_timeout_s)
        for old in sorted(folder.glob("version-*"))[: -self.config.weights.keep_snapshots]:
            shutil.rmtree(old, ignore_errors=True)
        return target
