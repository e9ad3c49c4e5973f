"""Bringing versions to the fleet: after each step, and to servers that have none or an old one.

| loop             | waits for                             | unblocked by                        |
|------------------|---------------------------------------|-------------------------------------|
| publish_loop     | an offer: a version that is gathered  | the controller, after each step     |
| catch_up_loop    | a STALE server, every POLL_S          | the fleet registry                  |

An offer is pushed while it is still being gathered. A newer offer replaces one whose push has not begun, or would have
to begin again without a member that failed: training never waits for a push, and no push is ever behind by more than
one version. A late joiner is served in a lane of its own, so that it delays nobody; it takes part in the next push if
that comes first.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.replay.contract import GroupConsumer
from penstock.store.fleet import SERVING_STATES, Fleet, ServerRecord, ServerState
from penstock.store.policies import PolicyRegistry
from penstock.store.run_control import RunControl
from penstock.tracing import Tracing
from penstock.v1 import policies_pb2
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import RoleGroup
from penstock_learner.weights.publisher import PushReport
from penstock_learner.weights.senders.sender import PushTarget

logger = logging.getLogger(__name__)
POLL_S = 0.5
MAX_BACKOFF_S = 60.0


@dataclass(frozen=True)
class Offer:
    """A version on its way out."""

    policy_version: int
    step: int
    metrics: asyncio.Future[Mapping[str, float]]
    """Of the step that made it; its record waits for them."""
    trace_parents: tuple[str, ...] = ()
    """Of the groups that it is the first version to contain."""
    parent_version: int | None = None
    """Whose weights it began from, where that is not the version before."""


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
        tracing: Tracing | None = None,
    ) -> None:
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.policy = policy
        self.term = term
        self.metrics = metrics
        self.control = RunControl(fleet.client, config.run)
        self.policies = PolicyRegistry(fleet.client, config.run)
        self.tracing = tracing or Tracing()
        self.current: int | None = None
        self.in_flight_updates = 0
        """Member commits during which requests were running."""
        self._offer: Offer | None = None
        """The newest, until its push begins."""
        self._pushing: int | None = None
        self._catching_up: dict[str, int] = {}
        """Servers in the catch-up lane, and the version each is getting."""
        self._changed = asyncio.Condition()
        self._snapshot_step: int | None = None
        self._kept_version: int | None = None
        self._failures: dict[str, tuple[int, float]] = {}
        """Failed pushes in a row of a server, and when it may be tried again."""

    async def gather(
        self, policy_version: int, step: int, trace_parents: tuple[str, ...] = (), parent_version: int | None = None
    ) -> Offer:
        """Stage the policy's weights as a version and offer it. Returns when training may change them again."""
        if self._offer is not None:
            trace_parents += self._offer.trace_parents
        offer = Offer(policy_version, step, asyncio.get_running_loop().create_future(), trace_parents, parent_version)
        async with self._changed:
            in_use = {self._pushing, self.current, *self._catching_up.values()}
            if self._offer is not None:
                self._count_skipped(self._offer.policy_version, policy_version)
            self._offer = offer
            self._changed.notify_all()
        keep = [version for version in in_use if version is not None]
        await self.policy.call_all("gather_weights", policy_version, self.term, keep)
        return offer

    async def settle(self) -> None:
        """Wait until everything that was offered is published."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._offer is None and self._pushing is None)

    async def publish_loop(self) -> None:
        """For ever: push the newest offer to every serving member, then make it the run's current version."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._offer is not None)
                offer, self._offer = self._offer, None
                assert offer is not None
                self._pushing = offer.policy_version
            is_published = await self._publish(offer)
            async with self._changed:
                if is_published:
                    self.current = offer.policy_version
                else:
                    assert self._offer is not None, "it gave way to this one"
                    self._count_skipped(offer.policy_version, self._offer.policy_version)
                    parents = self._offer.trace_parents + offer.trace_parents
                    self._offer = replace(self._offer, trace_parents=parents)
                self._pushing = None
                self._changed.notify_all()

    async def catch_up_loop(self) -> None:
        """For ever: bring the current version to servers that are STALE, without disturbing the others."""
        by_snapshot = self.config.weights.catch_up == "snapshot"
        transport = "snapshot" if by_snapshot else None
        while True:
            await asyncio.sleep(POLL_S)
            if self.current is None or self._pushing is not None:
                continue  # the push that runs takes STALE servers along
            if by_snapshot and self._kept_version == self.current:
                continue  # servers load it on their own
            version = self.current
            behind = [server for server in await self._followers(("STALE",)) if server.policy_version != version]
            if behind and self._pushing is None:
                logger.info("bringing version %d to %s", version, [server.server_id for server in behind])
                self._catching_up = {server.server_id: version for server in behind}
                try:
                    await self._push(version, behind, transport=transport, lane="catch_up")
                finally:
                    self._catching_up = {}

    def _count_skipped(self, policy_version: int, newer_version: int) -> None:
        logger.info("version %d is skipped: %d follows it already", policy_version, newer_version)
        self.metrics.syncs.labels("superseded").inc()

    async def _publish(self, offer: Offer) -> bool:
        """False where it gave way to a newer offer: nobody has it, and it is not published."""
        version, step, started_s = offer.policy_version, offer.step, time.time()
        followers = await self._followers(("READY", "LOADING", "STALE"))
        servers = [server for server in followers if server.server_id not in self._catching_up]
        report = await self._push(version, servers, base_version=self._common_base(servers))
        if report.superseded and self._offer is not None:
            return False
        snapshot = await self._snapshot(version, step)
        before = self.current if step else None
        record = policies_pb2.Policy(
            policy_version=version,
            step=step,
            parent_version=before if offer.parent_version is None else offer.parent_version,
            published_at_ms=int(time.time() * 1000),
            weights_digest=report.weights_digest,
            snapshot_path=str(snapshot) if snapshot else "",
            state=policies_pb2.Policy.PUBLISHED,
            metrics=await offer.metrics,
        )
        await self.queue.publish(version, step, record.SerializeToString())
        for trace_parent in offer.trace_parents:
            self.tracing.record("publish", trace_parent, started_s, time.time(), policy_version=version, step=step)
        self.metrics.version.labels("learner").set(version)
        return True

    async def _push(
        self,
        policy_version: int,
        servers: list[ServerRecord],
        *,
        transport: str | None = None,
        base_version: int | None = None,
        lane: str = "push",
    ) -> PushReport:
        """Push what is staged. Members that fail are evicted; they come back as STALE, and wait longer each time.

        A STALE server stays so until it has loaded: LOADING is for those that serve, and go on serving."""
        for server in servers:
            if server.state == "READY":
                await self.fleet.set_state(server.server_id, "LOADING", self.term)
        targets = [
            PushTarget(server.server_id, server.address, server.devices, server.host_id, server.transports)
            for server in servers
        ]
        weights = self.config.weights
        timeout_s = (weights.ready_timeout_s + 2 * weights.push_timeout_s) * (len(targets) + 1)
        report: PushReport = await self.policy.call_beside(
            lane, "push", policy_version, targets, transport, base_version, lane, timeout_s=timeout_s
        )
        for server_id in report.committed:
            state: ServerState = "READY" if policy_version == self._newest else "STALE"
            await self.fleet.set_state(server_id, state, self.term)
            self._failures.pop(server_id, None)
        for server_id, reason in report.failed.items():
            logger.warning("%s is evicted from the weight group: %s", server_id, reason)
            await self.fleet.set_state(server_id, "EVICTED", self.term)
            failures = self._failures.get(server_id, (0, 0.0))[0] + 1
            self._failures[server_id] = (failures, time.monotonic() + min(2.0**failures, MAX_BACKOFF_S))
        if report.running_requests:
            self.in_flight_updates += 1
        self.metrics.record_push(report)
        return report

    async def _followers(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """The reachable that take new versions: not those that an operator has pinned to one, and none at all where the
        servers are rolled back."""
        reachable = await self._reachable(states)
        if (await self.control.orders()).held_version is not None:
            return []
        pins = await self.policies.pins()
        return [server for server in reachable if server.server_id not in pins]

    @property
    def _newest(self) -> int | None:
        """What a serving member has: the version being pushed, else the current one."""
        return self.current if self._pushing is None else self._pushing

    def _common_base(self, servers: Sequence[ServerRecord]) -> int | None:
        """The version that every member serves, where deltas are wanted."""
        is_common = all(server.policy_version == self.current for server in servers)
        return self.current if self.config.weights.delta and is_common else None

    async def _reachable(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """Servers in one of the states, with a fresh heartbeat, that have not just failed.

        One that should serve and is silent is evicted: should it wake up, it must load before it leases again."""
        limit_ms = self.config.replay.lease_ttl_s * 1000
        reachable = []
        for server in await self.fleet.servers():
            is_silent = server.heartbeat_age_ms >= limit_ms
            if is_silent and server.state in SERVING_STATES:
                logger.warning("%s is evicted: silent for %.1f s", server.server_id, server.heartbeat_age_ms / 1000)
                await self.fleet.set_state(server.server_id, "EVICTED", self.term)
            retry_at = self._failures.get(server.server_id, (0, 0.0))[1]
            if not is_silent and server.state in states and time.monotonic() >= retry_at:
                reachable.append(server)
        return reachable

    async def _snapshot(self, policy_version: int, step: int) -> Path | None:
        """Keep the version, if none was kept for long enough, or it is the first or the last."""
        every, last = self.config.weights.snapshot_every_steps, self._snapshot_step
        is_due = last is None or step // every > last // every or step == self.config.learner.num_steps
        if not is_due:
            return None
        folder = self.config.folder / "snapshots"
        target = folder / f"version-{policy_version:08d}"
        timeout_s = self.config.learner.rank_timeout_s
        await self.policy.call_beside("push", "write_snapshot", policy_version, target, timeout_s=timeout_s)
        self._snapshot_step, self._kept_version = step, policy_version
        kept = {f"version-{version:08d}" for version in await self.policies.kept_versions()}
        for old in sorted(folder.glob("version-*"))[: -self.config.weights.keep_snapshots]:
            if old.name not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return target
