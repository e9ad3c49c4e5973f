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
from collections.abc import Mapping
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.fleet import Fleet, ServerRecord
from penstock.replay.contract import GroupConsumer
from penstock.v1 import policies_pb2
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.publisher import PushReport, PushTarget
from penstock_learner.role_group import RoleGroup

logger = logging.getLogger(__name__)
POLL_S = 0.5


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

    async def gather(self, policy_version: int) -> None:
        """Collect the weights as `policy_version`. Waits for a push that still uses the buckets."""
        async with self._lock:
            await self.policy.call_all("gather_weights", policy_version, self.term)

    async def publish(self, policy_version: int, step: int, step_metrics: Mapping[str, float]) -> None:
        """Push the gathered version to every serving member, then make it the run's current one."""
        async with self._lock:
            servers = await self._reachable()
            report = await self._push([server for server in servers if server.state != "JOINING"])
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
                stale = [server for server in await self._reachable() if server.state == "STALE"]
                behind = [server for server in stale if server.policy_version != self.current]
                if behind:
                    logger.info("bringing version %d to %s", self.current, [server.server_id for server in behind])
                    await self._push(behind)

    async def _push(self, servers: list[ServerRecord]) -> PushReport:
        """Push what is gathered. Members that fail are evicted; they come back as STALE."""
        for server in servers:
            await self.fleet.set_state(server.server_id, "LOADING")
        targets = [PushTarget(server.server_id, server.address) for server in servers]
        weights = self.config.weights
        timeout_s = (weights.ready_timeout_s + 2 * weights.push_timeout_s) * (len(targets) + 1)
        report: PushReport = await self.policy.call_beside("push", targets, timeout_s=timeout_s)
        for server_id in report.committed:
            await self.fleet.set_state(server_id, "READY")
        for server_id, reason in report.failed.items():
            logger.warning("%s is evicted from the weight group: %s", server_id, reason)
            await self.fleet.set_state(server_id, "EVICTED")
        if report.running_requests:
            self.in_flight_updates += 1
        self.metrics.record_push(report, weights.transport)
        return report

    async def _reachable(self) -> list[ServerRecord]:
        """Servers whose heartbeat is fresh. EVICTED ones have yet to notice and come back as STALE."""
        limit_ms = self.config.replay.lease_ttl_s * 1000
        return [
            server
            for server in await self.fleet.servers()
            if server.heartbeat_age_ms < limit_ms and server.state != "EVICTED"
        ]

    async def _snapshot(self, policy_version: int, step: int) -> Path | None:
        if step % self.config.weights.snapshot_every_steps and step != self.config.learner.num_steps:
            return None
        folder = self.config.folder / "snapshots"
        target = folder / f"version-{policy_version:08d}"
        await self.policy.call_beside("write_snapshot", target, timeout_s=self.config.learner.rank_timeout_s)
        for old in sorted(folder.glob("version-*"))[: -self.config.weights.keep_snapshots]:
            shutil.rmtree(old, ignore_errors=True)
        return target
