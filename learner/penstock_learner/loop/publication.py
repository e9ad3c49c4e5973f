"""Brings versions to the fleet: after each step, and to servers that have none or an old one.

| loop             | waits for                             | unblocked by                        |
|------------------|---------------------------------------|-------------------------------------|
| publish_loop     | a version that is staged, then for    | the step loop, after each step      |
|                  | its step and numbers, to register it  |                                     |
| catch_up_loop    | a server that is STALE, or whose      | the fleet registry, the quarantine  |
|                  | quarantine asks for it, every POLL_S  |                                     |

A version is pushed while it is still being staged. A newer version replaces one whose push has not begun, or whose
push would have to start again because a member failed. So training never waits for a push, and at most one version
waits behind the push that runs. A server that joins late gets its weights in a separate lane, so it does not delay the
others. If the next push comes first, the server takes part in that push. A server that failed in a push takes part in
no other until it has caught up alone.

Only `publish_loop` waits without a deadline, for work to do. Every other wait has one and raises DeadlineExceeded.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.config.run import RunConfig
from penstock.errors import DeadlineExceeded, DiskFull, PenstockError, TrainingDiverged
from penstock.machine import is_disk_full, measure_disk
from penstock.replay.queue import GroupConsumer
from penstock.store.fleet import SERVING_STATES, Fleet, FleetView, PolicyRegistry, RunControl, ServerRecord, ServerState
from penstock.tracing import Tracing
from penstock.v1 import policies_pb2
from penstock_learner.agreement.servers import NUM_PROBES, ServerQuarantine
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.roles.role_group import RoleGroup
from penstock_learner.weights.senders import PushReport, PushTarget

logger = logging.getLogger(__name__)
MAX_VIEW_AGE_S = 5.0
"""How often the whole fleet is read although nothing in it has changed."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 2.0, 15.0
"""Time until a server that failed in a push is tried again, after the first failure and at most."""


class Followers:
    """The servers of a run that take new versions, under a learner's term. A server that failed in a push is skipped
    for a time, which doubles with each failure in a row, up to MAX_BACKOFF_S."""

    def __init__(self, config: RunConfig, fleet: Fleet, policies: PolicyRegistry, term: int) -> None:
        self.config = config
        self.fleet = fleet
        self.view = FleetView(fleet, MAX_VIEW_AGE_S)
        self.control = RunControl(fleet.client, config.run)
        self.policies = policies
        self.term = term
        self.failures: dict[str, tuple[int, float]] = {}
        """For each server whose last push failed its failures in a row, and when it may be tried again."""

    async def in_states(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """The reachable servers that take new versions: none while a rewind holds them, and none that is pinned."""
        reachable = await self._reachable(states)
        if (await self.control.orders()).held_version is not None:
            return []
        pins = await self.policies.pins()
        return [server for server in reachable if server.server_id not in pins]

    async def are_current(self) -> bool:
        """Whether no server is STALE, and no serving one is silent, without reading each of them. A server that
        becomes STALE changes the view at once. None becomes silent before the reading says so."""
        reading = await self.view.current()
        is_stale = any(server.state == "STALE" for server in reading.servers)
        return not is_stale and reading.first_silence_s(self.config.replay.lease_ttl_s) > 0

    async def record(self, report: PushReport, state: ServerState) -> None:
        """Set the state of members that committed. Evict members that failed, and count the failure."""
        await self.fleet.set_states(report.committed, state, self.term)
        for server_id in report.committed:
            self.failures.pop(server_id, None)
        await self.fleet.set_states(list(report.failed), "EVICTED", self.term)
        for server_id, reason in report.failed.items():
            logger.warning("%s is evicted from the weight group: %s", server_id, reason)
            failures = self.failures.get(server_id, (0, 0.0))[0] + 1
            backoff_s = min(FIRST_BACKOFF_S * 2.0 ** (failures - 1), MAX_BACKOFF_S)
            self.failures[server_id] = (failures, time.monotonic() + backoff_s)

    async def _reachable(self, states: Sequence[ServerState]) -> list[ServerRecord]:
        """Servers in one of the states, with a fresh heartbeat, that have not just failed. A serving server without
        heartbeats is evicted. If it wakes up, it must load a version before it leases."""
        limit_ms = self.config.replay.lease_ttl_s * 1000
        reachable = []
        for server in await self.fleet.servers():
            is_silent = server.heartbeat_age_ms >= limit_ms
            if is_silent and server.state in SERVING_STATES:
                logger.warning("%s is evicted: silent for %.1f s", server.server_id, server.heartbeat_age_ms / 1000)
                await self.fleet.set_state(server.server_id, "EVICTED", self.term)
            retry_at = self.failures.get(server.server_id, (0, 0.0))[1]
            if not is_silent and server.state in states and time.monotonic() >= retry_at:
                reachable.append(server)
        return reachable


@dataclass(eq=False)
class VersionSnapshots:
    """Has policy rank 0 write snapshots of staged versions, and keeps the newest snapshots and the ones in use."""

    config: RunConfig
    policy: RoleGroup
    policies: PolicyRegistry
    written: set[int] = field(default_factory=set)
    """Versions whose snapshots this learner has written."""
    last_step: int | None = None
    """The step of the newest snapshot that was due."""

    async def write_if_due(self, policy_version: int, step: int) -> Path | None:
        """Write a snapshot of the version if one is due: every `snapshot_every_steps`, and the first and last."""
        every, last = self.config.weights.snapshot_every_steps, self.last_step
        is_due = last is None or step // every > last // every or step == self.config.learner.num_steps
        if not is_due:
            return None
        target = await self.write(policy_version)
        self.last_step = step
        return target

    async def write(self, policy_version: int) -> Path:
        """Write a snapshot of a staged version, and remove snapshots that are no longer needed."""
        folder = self.config.folder / "snapshots"
        target = folder / f"version-{policy_version:08d}"
        timeout_s = self.config.learner.rank_timeout_s
        try:
            await self.policy.call_in_lane(
                "push", "publisher.write_snapshot", policy_version, target, timeout_s=timeout_s
            )
        except PenstockError as error:
            if not is_disk_full(error, folder):
                raise
            shutil.rmtree(target, ignore_errors=True)
            raise DiskFull(
                f"no space is left to write the snapshot of version {policy_version} ({measure_disk(folder)}); free "
                "space there, or lower weights.keep_snapshots, then start the learner again"
            ) from error
        self.written.add(policy_version)
        kept = await self.policies.kept_versions()
        on_disk = await asyncio.to_thread(_remove_old_snapshots, folder, self.config.weights.keep_snapshots, kept)
        await self.policies.record_snapshots(on_disk)
        await self.policies.forget_old(kept | set(on_disk))
        return target


def _remove_old_snapshots(folder: Path, num_newest: int, kept: Collection[int]) -> dict[int, str]:
    """Remove all snapshots except the newest and the ones in `kept`. Returns the folders that remain, by version."""
    for old in sorted(folder.glob("version-*"))[:-num_newest]:
        if _version_of(old) not in kept:
            shutil.rmtree(old, ignore_errors=True)
    return {_version_of(snapshot): str(snapshot) for snapshot in folder.glob("version-*")}


def _version_of(snapshot: Path) -> int:
    """The version in the name of a snapshot's folder; -1 if there is none."""
    number = snapshot.name.removeprefix("version-")
    return int(number) if number.isdecimal() else -1


POLL_S = 0.5


@dataclass(frozen=True)
class GatheredVersion:
    """A version whose weights rank 0 holds, or is still gathering."""

    policy_version: int
    trace_parents: tuple[str, ...] = ()
    """Trace contexts of the groups that were first trained into this version."""
    parent_version: int | None = None
    """The version whose weights this one started from, if it is not the version before."""


class PolicyPublication:
    """Owns the order in which versions become current. `current` is the newest version that was published."""

    def __init__(
        self, config: RunConfig, queue: GroupConsumer, fleet: Fleet, policy: RoleGroup, term: int,
        metrics: LearnerMetrics, tracing: Tracing | None = None, quarantine: ServerQuarantine | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.queue = queue
        self.fleet = fleet
        self.policy = policy
        self.term = term
        self.metrics = metrics
        self.policies = PolicyRegistry(fleet.client, config.run)
        self.followers = Followers(config, fleet, self.policies, term)
        self.snapshots = VersionSnapshots(config, policy, self.policies)
        self.tracing = tracing or Tracing()
        self.quarantine = quarantine
        self.current: int | None = None
        self.in_flight_updates = 0
        """Member commits during which requests were running."""
        self.computed_s = 0.0
        """Seconds of computing between the last two gatherings, on the slowest rank of the policy."""
        self.push_rate: dict[str, float] = {}
        """Bytes per second of the newest push that reached a server, as a number of a step."""
        self._computed_before_s = 0.0
        self._staged: GatheredVersion | None = None
        """The newest version, until its push begins."""
        self._steps: dict[int, tuple[int, Mapping[str, float]]] = {}
        """By version the step that made it, and the step's numbers. Its record in the policy registry holds them."""
        self._pushing: int | None = None
        self._members: frozenset[str] = frozenset()
        """The servers that take part in the push that runs."""
        self._catching_up: dict[str, int] = {}
        """The version that each server in the catch-up lane is getting."""
        self._promoting: int | None = None
        """The version whose snapshot is written because it was promoted."""
        self._changed = asyncio.Condition()
        self._held: set[int] = set()
        """Versions whose buckets rank 0 holds."""

    async def stage(
        self, policy_version: int, trace_parents: tuple[str, ...] = (), parent_version: int | None = None
    ) -> GatheredVersion:
        """Stage the policy's weights as a version, whose push begins at once. Returns when training may change the
        weights again. Call `publish` then."""
        promoted = await self.policies.promoted_version()
        if self._staged is not None:
            trace_parents += self._staged.trace_parents
        staged = GatheredVersion(policy_version, trace_parents, parent_version)
        async with self._changed:
            in_use = {self._pushing, self.current, self._promoting, *self._catching_up.values()}
            if promoted in self._held - self.snapshots.written:
                in_use.add(promoted)  # its snapshot was promised, and is not written yet
            if self._staged is not None:
                self._count_skipped(self._staged.policy_version, policy_version)
            self._staged = staged
            self._changed.notify_all()
            keep = [version for version in in_use if version is not None]
            self._held = {*keep, policy_version}
        totals = await self.policy.call_all("gather_weights", policy_version, self.term, keep)
        self.computed_s = max(totals) - self._computed_before_s
        self._computed_before_s = max(totals)
        return staged

    async def publish(self, staged: GatheredVersion, step: int, numbers: Mapping[str, float]) -> None:
        """Let the version become the run's current one once it is pushed, unless a newer one supersedes it. `numbers`
        are those of the step that made it."""
        async with self._changed:
            self._steps = {version: made for version, made in self._steps.items() if version == self._pushing}
            self._steps[staged.policy_version] = (step, numbers)
            self._changed.notify_all()

    async def wait_until_published(self) -> None:
        """Wait until every staged version is published or superseded. The deadline covers the publication that runs and
        the newest version behind it."""
        num_servers = await self.fleet.num_servers()
        timeout_s = 2 * (self._push_timeout_s(num_servers) + self.config.learner.rank_timeout_s)
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._staged is None and self._pushing is None)
        except TimeoutError as error:
            version = self._pushing if self._staged is None else self._staged.policy_version
            raise DeadlineExceeded(
                f"version {version} was not published in {timeout_s:.0f} s; see the log of policy rank 0 and of the "
                "rollout servers"
            ) from error

    async def publish_loop(self) -> None:
        """Runs forever: pushes the newest version to every serving member, then makes it the run's current one."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._staged is not None)
                staged, self._staged = self._staged, None
                assert staged is not None
                self._pushing = staged.policy_version
            is_published = await self._push_and_register(staged)
            async with self._changed:
                if is_published:
                    self.current = staged.policy_version
                else:
                    assert self._staged is not None, "a push is superseded only by a newer version"
                    self._count_skipped(staged.policy_version, self._staged.policy_version)
                    parents = self._staged.trace_parents + staged.trace_parents
                    self._staged = replace(self._staged, trace_parents=parents)
                self._pushing = None
                self._changed.notify_all()

    async def catch_up_loop(self) -> None:
        """Runs forever: brings the current version to servers that are STALE or in quarantine, without disturbing the
        others. A server that failed before is tried alone, so that only itself waits for it."""
        by_snapshot = self.config.weights.catch_up == "snapshot"
        transport = "snapshot" if by_snapshot else None
        while True:
            await asyncio.sleep(POLL_S)
            if self.current is not None:
                await self._load_quarantined(transport)
            await self._keep_promoted()
            if self.current is None or (self._pushing is not None and not self.followers.failures):
                continue  # the running push serves STALE servers too
            if by_snapshot and self.current in self.snapshots.written:
                continue  # servers load the snapshot themselves
            if await self.followers.are_current():
                continue
            stale = await self.followers.in_states(("STALE",))
            behind = [server for server in stale if server.policy_version != self.current]
            failed = [server for server in behind if server.server_id in self.followers.failures]
            others = [server for server in behind if server not in failed] if self._pushing is None else []
            for servers in ([others] if others else []) + [[server] for server in failed]:
                await self._catch_up(servers, transport)

    async def _load_quarantined(self, transport: str | None) -> None:
        """Send the whole current version to the servers in quarantine that are due, one after the other. If no other
        server is left to fill a step's batch, which is compared as a whole, these sample enough for it."""
        if self.quarantine is None or not self.quarantine.records:
            return
        await self.quarantine.read()
        servers = await self.followers.in_states(("READY", "LOADING", "STALE"))
        is_alone = all(self.quarantine.holds(server.server_id) for server in servers)
        num_probes = 2 * self.config.replay.groups_per_step if is_alone else NUM_PROBES
        for server in servers:
            if server.server_id in self._members or not self.quarantine.is_due(server):
                continue
            version = self.current
            if server.server_id in await self._catch_up([server], transport):
                await self.quarantine.loaded(server.server_id, version or 0, num_probes)

    async def _catch_up(self, servers: list[ServerRecord], transport: str | None) -> list[str]:
        """Push the current version to these servers alone. Returns the servers that have loaded it."""
        version = self.current
        assert version is not None
        logger.info("bringing version %d to %s", version, [server.server_id for server in servers])
        self._catching_up = {server.server_id: version for server in servers}
        try:
            report = await self._push(version, servers, transport=transport, lane="catch_up")
        finally:
            self._catching_up = {}
        if version != self._newest:  # the push of a newer one may have begun without these
            missed = [server_id for server_id in report.committed if server_id not in self._members]
            await self.fleet.set_states(missed, "STALE", self.term)
        return report.committed

    def _count_skipped(self, policy_version: int, newer_version: int) -> None:
        logger.info("version %d is skipped: version %d is newer", policy_version, newer_version)
        self.metrics.syncs.labels("superseded").inc()

    async def _push_and_register(self, staged: GatheredVersion) -> bool:
        """Push and register the version. Returns False if a newer one superseded it; then no server has it."""
        version, started_s = staged.policy_version, time.time()
        followers = await self.followers.in_states(("READY", "LOADING", "STALE"))
        servers = [server for server in followers if not self._catches_up_alone(server)]
        self._members = frozenset(server.server_id for server in servers)
        has_base = all(server.policy_version == self.current for server in servers)  # for a delta
        report = await self._push(version, servers, base_version=self.current if has_base else None)
        seconds = sum(report.seconds.get(phase, 0.0) for phase in ("encode", "announce", "transfer", "commit"))
        if report.committed and seconds:
            self.push_rate = {"push_bytes_per_second": report.num_bytes / seconds}
        self._members = frozenset()
        if report.superseded and self._staged is not None and not report.nonfinite:
            return False
        step, numbers = await self._step_of(version)
        if report.nonfinite:
            raise self._diverged(version, step, report.nonfinite)
        snapshot = await self.snapshots.write_if_due(version, step)
        before = self.current if step else None
        record = policies_pb2.Policy(
            policy_version=version,
            step=step,
            parent_version=before if staged.parent_version is None else staged.parent_version,
            published_at_ms=int(time.time() * 1000),
            weights_digest=report.weights_digest,
            snapshot_path=str(snapshot) if snapshot else "",
            state=policies_pb2.Policy.PUBLISHED,
            metrics=numbers,
        )
        await self.queue.publish(version, step, record.SerializeToString())
        for trace_parent in staged.trace_parents:
            self.tracing.record("publish", trace_parent, started_s, time.time(), policy_version=version, step=step)
        self.metrics.version.labels("learner").set(version)
        return True

    def _diverged(self, version: int, step: int, tensor: str) -> TrainingDiverged:
        """The error that ends a run whose weights are not finite. A restart continues from the newest checkpoint."""
        self.metrics.syncs.labels("nonfinite").inc()
        model = self.config.model
        if step == 0:
            return TrainingDiverged(
                f"{tensor} of {model.path} is not finite in {model.dtype}, so no version is published; "
                "download the model again, or choose another model.dtype"
            )
        return TrainingDiverged(
            f"{tensor} is not finite in {model.dtype} after step {step}, so version {version} is "
            "not published; start the learner again to continue from the newest checkpoint, with a lower learner.lr"
        )

    async def _step_of(self, version: int) -> tuple[int, Mapping[str, float]]:
        """The step that made the version, and its numbers. The step loop may make two calls to the ranks before it
        publishes what it has staged."""
        timeout_s = 2 * self.config.learner.rank_timeout_s
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: version in self._steps)
                return self._steps.pop(version)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"version {version} was staged and not published in {timeout_s:.0f} s; a rank hangs or is overloaded "
                "(see its log, or raise learner.rank_timeout_s)"
            ) from error

    async def _push(
        self, policy_version: int, servers: list[ServerRecord], *, transport: str | None = None,
        base_version: int | None = None, lane: str = "push",
    ) -> PushReport:  # fmt: skip
        """Push a staged version. Members that fail are evicted. They come back as STALE, and catch up alone. A READY
        server is LOADING during the push and goes on serving. A STALE server stays STALE until it has loaded the
        version."""
        ready = [server.server_id for server in servers if server.state == "READY"]
        await self.fleet.set_states(ready, "LOADING", self.term)
        targets = [
            PushTarget(
                server.server_id, server.address, server.devices, server.host_id, server.transports, server.nccl_version
            )
            for server in servers
        ]
        report: PushReport = await self.policy.call_in_lane(
            lane, "publisher.push", policy_version, targets, transport, base_version, lane,
            timeout_s=self._push_timeout_s(len(targets)),
        )  # fmt: skip
        state: ServerState = "READY" if policy_version == self._newest else "STALE"
        await self.followers.record(report, state)
        if report.running_requests:
            self.in_flight_updates += 1
        self.metrics.record_push(report)
        return report

    def _catches_up_alone(self, server: ServerRecord) -> bool:
        has_failed = server.state == "STALE" and server.server_id in self.followers.failures
        is_held = self.quarantine is not None and self.quarantine.awaits_load(server.server_id)
        return has_failed or is_held or server.server_id in self._catching_up

    def _push_timeout_s(self, num_servers: int) -> float:
        """Upper bound on a push. Each server can fail, and the push then starts again without it. An attempt is an
        announcement, the sending, which may include encoding a delta, and an abort."""
        weights = self.config.weights
        return 2 * (weights.ready_timeout_s + weights.push_timeout_s) * (num_servers + 1)

    @property
    def _newest(self) -> int | None:
        """The version that a READY member has: the one being pushed, else the current one."""
        return self.current if self._pushing is None else self._pushing

    async def _keep_promoted(self) -> None:
        """Write a snapshot of the version that was promoted, if it has none. Its buckets stay until then."""
        version = await self.policies.promoted_version()
        if version in self._held - self.snapshots.written and self._pushing is None and version is not None:
            await self._keep(version)
            logger.info("version %d was promoted, so its snapshot is kept", version)

    async def _keep(self, version: int) -> None:
        """Write a snapshot of a version, whose buckets stay until it is written."""
        self._promoting = version
        try:
            await self.snapshots.write(version)
        finally:
            self._promoting = None

    async def keep_last(self) -> None:
        """Write a snapshot of the current version if it has none. Called when no step follows."""
        if self.current is not None and self.current not in self.snapshots.written:
            await self._keep(self.current)
