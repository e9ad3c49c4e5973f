"""The order of versions: training never waits for a push, the newest version wins, late joiners have their own lane."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.cancellation import end_task
from penstock.errors import DeadlineExceeded, NotFound, TrainingDiverged
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, PolicyRegistry, Quarantines, ServerRecord
from penstock.store.redis_client import connect
from penstock_learner.agreement.servers import ServerQuarantine, ServerVerdict
from penstock_learner.loop.publication import PolicyPublication
from penstock_learner.metrics import LearnerMetrics
from penstock_learner.weights.senders import PushReport
from support.learner_runs import make_config
from support.redis_server import RedisProcess


@dataclass
class ScriptedPolicy:
    """Replaces the policy's actors. A push lasts until the test ends it."""

    pushed: list[tuple[str, int, list[str]]] = field(default_factory=list)
    """Lane, version and servers of every push that has begun."""
    gathered: list[tuple[int, list[int]]] = field(default_factory=list)
    """For every gather: its version, and the versions to keep."""
    failures: dict[str, str] = field(default_factory=dict)
    gives_way: bool = False
    """Whether the next push reports that a newer version has superseded it."""
    nonfinite: str = ""
    """Name of the tensor for which every push is refused."""
    snapshots: list[int] = field(default_factory=list)
    """Version of every snapshot that was written."""
    makes_folders: bool = False
    gates: dict[str, deque[asyncio.Event]] = field(default_factory=dict)

    def hold(self, lane: str) -> asyncio.Event:
        """Make the next push of the lane wait for the event."""
        event = asyncio.Event()
        self.gates.setdefault(lane, deque()).append(event)
        return event

    async def call_all(self, method: str, version: int, term: int, keep: list[int]) -> list[float]:
        self.gathered.append((version, sorted(keep)))
        return [1.5 * len(self.gathered), 2.0 * len(self.gathered)]

    async def call_in_lane(self, lane: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method == "publisher.write_snapshot":
            version, target = arguments
            self.snapshots.append(version)
            if self.makes_folders:
                target.mkdir(parents=True)
        if method != "publisher.push":
            return None
        version, targets = arguments[0], arguments[1]
        names = [target.server_id for target in targets]
        self.pushed.append((lane, version, names))
        if self.gates.get(lane):
            await self.gates[lane].popleft().wait()
        if self.nonfinite:
            return PushReport(version, nonfinite=self.nonfinite)
        if self.gives_way:
            self.gives_way = False
            return PushReport(version, "gloo", "digest", superseded=names)
        failed = {name: why for name, why in self.failures.items() if name in names}
        return PushReport(version, "gloo", "digest", [name for name in names if name not in failed], failed)


@dataclass
class Setting:
    publication: PolicyPublication
    policy: ScriptedPolicy
    fleet: Fleet
    policies: PolicyRegistry
    publish_loop: asyncio.Task[None]
    catch_up_loop: asyncio.Task[None]

    async def offer(self, version: int) -> None:
        await self.publication.publish(await self.publication.stage(version), version, {})

    async def join(self, name: str, state: Any, version: int) -> None:
        await self.fleet.join(ServerRecord(name, "127.0.0.1:1", "torch", policy_version=version))
        await self.fleet.set_state(name, state)

    async def state(self, name: str) -> str:
        return {server.server_id: server.state for server in await self.fleet.servers()}[name]


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def setting(tmp_path: Path, redis_process: RedisProcess) -> AsyncIterator[Setting]:
    config = make_config(tmp_path, tmp_path, redis_process.url, f"publication-{tmp_path.name}")
    replay = config.replay.model_copy(update={"lease_ttl_s": 600.0})  # the servers report only once
    config = config.model_copy(update={"replay": replay})
    client = connect(config.redis)
    queue, fleet = RedisReplayQueue(client, config.run, config.replay), Fleet(client, config.run)
    term = await queue.take_term(0)
    policy: Any = ScriptedPolicy()
    metrics = LearnerMetrics(CollectorRegistry(), "standalone")
    publication = PolicyPublication(config, queue, fleet, policy, term, metrics)
    loops = [asyncio.create_task(publication.publish_loop()), asyncio.create_task(publication.catch_up_loop())]
    yield Setting(publication, policy, fleet, PolicyRegistry(client, config.run), *loops)
    for loop in loops:
        await end_task(loop)
    await client.aclose()


async def test_a_version_that_no_push_has_begun_gives_way_to_a_newer_one(setting: Setting) -> None:
    await setting.join("a", "READY", 0)
    held = setting.policy.hold("push")
    await setting.offer(1)
    await eventually(lambda: len(setting.policy.pushed) == 1)
    await setting.offer(2)
    await setting.offer(3)
    assert [version for version, _ in setting.policy.gathered] == [1, 2, 3], "training did not wait for the push"
    assert setting.policy.gathered[1][1] == setting.policy.gathered[2][1] == [1], (
        "the version that is being pushed is kept"
    )
    held.set()
    await setting.publication.wait_until_published()
    assert [version for _, version, _ in setting.policy.pushed] == [1, 3]
    assert setting.publication.current == 3
    published = await setting.policies.newest_first(None, 10)
    assert [(policy.policy_version, policy.parent_version) for policy in published] == [(3, 1), (1, 0)]


async def test_the_time_that_ranks_computed_is_that_since_the_version_before(setting: Setting) -> None:
    """The ranks report totals, and the slowest one counts."""
    await setting.offer(1)
    assert setting.publication.computed_s == 2
    await setting.offer(2)
    assert setting.publication.computed_s == 2, "not the total of 4"


async def test_old_versions_are_listed_only_with_a_mark_or_a_snapshot(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.fleet.NUM_LISTED", 3)
    publication = setting.publication
    weights = publication.config.weights.model_copy(update={"snapshot_every_steps": 1})
    publication.snapshots.config = publication.config.model_copy(update={"weights": weights})
    (publication.config.folder / "snapshots" / "version-00000002").mkdir(parents=True)
    await setting.policies.pin("nightly", 1)
    for version in range(1, 8):
        await setting.offer(version)
        await publication.wait_until_published()
    listed = [policy.policy_version for policy in await setting.policies.newest_first(None, 100)]
    assert listed == [7, 6, 5, 4, 2, 1]
    with pytest.raises(NotFound, match="version 3 was never published, or is too old to be listed"):
        await setting.policies.get(3)


async def test_a_version_that_is_not_finite_ends_the_run_and_is_not_published(setting: Setting) -> None:
    await setting.join("a", "READY", 0)
    await setting.offer(1)
    await setting.publication.wait_until_published()
    setting.policy.nonfinite = "lm_head.weight"
    await setting.offer(2)
    async with asyncio.timeout(120):
        with pytest.raises(
            TrainingDiverged, match=r"lm_head.weight is not finite in \w+ after step 2, so version 2 is not published"
        ):
            await setting.publish_loop
    assert [policy.policy_version for policy in await setting.policies.newest_first(None, 10)] == [1]
    assert setting.publication.metrics.syncs.labels("nonfinite")._value.get() == 1


async def test_a_version_whose_push_gave_way_is_not_published(setting: Setting) -> None:
    await setting.join("a", "READY", 0)
    held = setting.policy.hold("push")
    setting.policy.gives_way = True
    await setting.offer(1)
    await eventually(lambda: len(setting.policy.pushed) == 1)
    await setting.offer(2)
    held.set()
    await setting.publication.wait_until_published()
    assert [(version, names) for _, version, names in setting.policy.pushed] == [(1, ["a"]), (2, ["a"])]
    assert [policy.policy_version for policy in await setting.policies.newest_first(None, 10)] == [2]
    assert setting.publication.current == 2
    assert await setting.state("a") == "READY"


async def test_a_late_joiner_that_hangs_delays_no_push(setting: Setting) -> None:
    await setting.join("a", "READY", 0)
    await setting.offer(1)
    await setting.publication.wait_until_published()
    held = setting.policy.hold("catch_up")
    await setting.join("late", "STALE", 0)
    await eventually(lambda: ("catch_up", 1, ["late"]) in setting.policy.pushed)
    await setting.offer(2)
    await setting.publication.wait_until_published()
    assert ("push", 2, ["a"]) in setting.policy.pushed
    assert setting.policy.gathered[-1] == (2, [1]), "the version that the late joiner is getting is kept"
    held.set()
    await eventually(lambda: ("catch_up", 2, ["late"]) in setting.policy.pushed)
    await eventually(lambda: not setting.publication._catching_up)
    assert await setting.state("late") == "READY"


async def test_a_member_that_fails_is_evicted_and_the_version_published(setting: Setting) -> None:
    await setting.join("a", "READY", 0)
    await setting.join("b", "READY", 0)
    setting.policy.failures["b"] = "it hung"
    await setting.offer(1)
    await setting.publication.wait_until_published()
    assert await setting.state("a") == "READY"
    assert await setting.state("b") == "EVICTED"
    assert setting.publication.current == 1


async def test_a_member_that_failed_is_in_no_push_until_it_has_caught_up_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that the learner cannot reach still reports to Redis, so it is STALE again after each failure."""
    monkeypatch.setattr("penstock_learner.loop.publication.FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr("penstock_learner.loop.publication.POLL_S", 0.02)
    policy = setting.policy
    await setting.join("a", "READY", 0)
    await setting.join("b", "READY", 0)
    policy.failures["b"] = "announce: UNAVAILABLE"
    await setting.offer(1)
    await setting.publication.wait_until_published()
    unreachable = policy.hold("catch_up")
    await setting.fleet.set_state("b", "STALE")
    await eventually(lambda: ("catch_up", 1, ["b"]) in policy.pushed)
    await setting.join("new", "STALE", 0)
    for version in range(2, 6):
        await setting.offer(version)
        await setting.publication.wait_until_published()
        assert ("push", version, ["a", "new"]) in policy.pushed
    unreachable.set()
    await eventually(lambda: not setting.publication._catching_up)
    assert await setting.state("b") == "EVICTED"

    policy.failures.clear()
    held, catching_up = policy.hold("push"), policy.hold("catch_up")
    await setting.fleet.set_state("b", "STALE")
    await setting.offer(6)
    await eventually(lambda: ("push", 6, ["a", "new"]) in policy.pushed)
    await eventually(lambda: ("catch_up", 5, ["b"]) in policy.pushed)
    catching_up.set()
    await eventually(lambda: not setting.publication._catching_up)
    await end_task(setting.catch_up_loop)  # which would bring it version 6 too, if it came before the next push
    held.set()
    await setting.publication.wait_until_published()
    await setting.offer(7)
    await setting.publication.wait_until_published()
    assert ("push", 7, ["a", "b", "new"]) in policy.pushed


async def test_a_server_in_quarantine_gets_the_whole_current_version_again(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_learner.loop.publication.POLL_S", 0.02)
    publication, policy = setting.publication, setting.policy
    quarantine = with_quarantine(publication, setting)
    await setting.join("a", "READY", 0)
    await setting.join("b", "READY", 0)
    await setting.offer(1)
    await publication.wait_until_published()
    await setting.fleet.report(ServerRecord("b", "127.0.0.1:1", "torch", policy_version=1, running_groups=1))
    await quarantine.begin(ServerVerdict("b", 0.4, 0.1, agrees=False, disagrees=True, is_beyond=True), policy_version=1)
    await setting.offer(2)
    await publication.wait_until_published()
    assert policy.pushed[-1] == ("push", 2, ["a"]), "it takes part in no other push, and still has a running group"

    held = policy.hold("push")
    await setting.fleet.report(ServerRecord("b", "127.0.0.1:1", "torch", policy_version=2))
    await setting.offer(3)
    await eventually(lambda: ("catch_up", 2, ["b"]) in policy.pushed)
    await eventually(lambda: quarantine.records["b"].num_reloads == 1)
    [record] = (await quarantine.store.read()).values()
    assert (record.num_reloads, record.probes_left, record.mismatch_nats) == (1, 2, 0.4)
    await setting.fleet.report(ServerRecord("b", "127.0.0.1:1", "torch", policy_version=3))
    held.set()
    await publication.wait_until_published()
    await setting.offer(4)
    await publication.wait_until_published()
    assert ("push", 4, ["a", "b"]) in policy.pushed, "while it is probed, it takes part again"


async def test_the_only_servers_left_sample_enough_for_a_batch_to_be_compared(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is compared when it is full. Two probes of each server would never fill it."""
    monkeypatch.setattr("penstock_learner.loop.publication.POLL_S", 0.02)
    publication = setting.publication
    quarantine = with_quarantine(publication, setting)
    await setting.join("a", "READY", 0)
    await setting.offer(1)
    await publication.wait_until_published()
    await quarantine.begin(ServerVerdict("a", 0.4, 0.1, agrees=False, disagrees=True, is_beyond=True), policy_version=1)
    await eventually(lambda: "a" in quarantine.records and quarantine.records["a"].num_reloads == 1)
    assert quarantine.records["a"].probes_left >= publication.config.replay.groups_per_step


async def test_a_server_that_was_started_again_is_not_put_back_into_quarantine(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_learner.loop.publication.POLL_S", 0.02)
    publication = setting.publication
    quarantine = with_quarantine(publication, setting)
    await setting.join("a", "READY", 0)
    await setting.join("b", "READY", 0)
    await setting.offer(1)
    await publication.wait_until_published()
    await setting.fleet.report(ServerRecord("b", "127.0.0.1:1", "torch", policy_version=1, running_groups=1))
    await quarantine.begin(ServerVerdict("b", 0.4, 0.1, agrees=False, disagrees=True, is_beyond=True), policy_version=1)
    await setting.fleet.leave("b")
    await setting.join("b", "READY", 1)
    await eventually(lambda: "b" not in quarantine.records)
    assert await quarantine.store.read() == {}


def with_quarantine(publication: PolicyPublication, setting: Setting) -> ServerQuarantine:
    """Give the publication a quarantine without servers."""
    store = Quarantines(setting.fleet.client, publication.config.run)
    publication.quarantine = ServerQuarantine(store, publication.term)
    return publication.quarantine


def with_short_deadlines(publication: PolicyPublication) -> None:
    """Use deadlines that pass within the test."""
    config = publication.config
    weights = config.weights.model_copy(update={"ready_timeout_s": 0.05, "push_timeout_s": 0.05})
    learner = config.learner.model_copy(update={"rank_timeout_s": 0.1})
    publication.config = config.model_copy(update={"weights": weights, "learner": learner})


async def test_waiting_for_a_push_that_hangs_has_a_deadline(setting: Setting) -> None:
    with_short_deadlines(setting.publication)
    setting.policy.hold("push")
    await setting.offer(1)
    await eventually(lambda: len(setting.policy.pushed) == 1)
    with pytest.raises(DeadlineExceeded, match="version 1 was not published in"):
        await setting.publication.wait_until_published()


async def test_a_staged_version_that_is_never_published_ends_the_publication(setting: Setting) -> None:
    with_short_deadlines(setting.publication)
    await setting.publication.stage(1)
    with pytest.raises(DeadlineExceeded, match="version 1 was staged and not published in"):
        await asyncio.wait_for(asyncio.shield(setting.publish_loop), 120)


async def test_the_newest_version_is_kept_when_it_is_promoted(setting: Setting) -> None:
    setting.policy.makes_folders = True
    for version in (1, 2):
        await setting.offer(version)
        await setting.publication.wait_until_published()
    assert setting.policy.snapshots == [1], "a snapshot is not due after every step"
    promoted, other = await setting.policies.get(2), await setting.policies.get(1)
    await setting.policies.promote(2)
    await eventually(lambda: setting.policy.snapshots == [1, 2])
    async with asyncio.timeout(120):
        while not promoted.snapshot_path:
            await asyncio.sleep(0.01)
            await setting.policies.add_marks([promoted, other])
    assert Path(promoted.snapshot_path).is_dir() and Path(other.snapshot_path).is_dir()
    assert (await setting.policies.get(2)).snapshot_path == promoted.snapshot_path, "servers can load it"
    await setting.offer(3)
    await setting.publication.wait_until_published()
    assert setting.policy.snapshots == [1, 2], "it is made once"


async def test_a_version_that_was_promoted_just_before_the_next_one_is_kept(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the newest when the gateway promised its snapshot, and a newer one is pushed before the learner looks."""
    may_look, keep_promoted = asyncio.Event(), setting.publication._keep_promoted

    async def look_late() -> None:
        await may_look.wait()
        await keep_promoted()

    monkeypatch.setattr(setting.publication, "_keep_promoted", look_late)
    setting.policy.makes_folders = True
    await setting.join("a", "READY", 0)
    for version in (1, 2):
        await setting.offer(version)
        await setting.publication.wait_until_published()
    await setting.policies.promote(2)
    held = [setting.policy.hold("push") for _ in range(2)]
    for version, release in zip((3, 4), held, strict=True):
        await setting.offer(version)
        await eventually(lambda version=version: setting.policy.pushed[-1][1] == version)  # type: ignore[misc]
        if version == 3:
            release.set()
            await setting.publication.wait_until_published()
    assert 2 in setting.policy.gathered[-1][1], "its weights stay"
    may_look.set()
    held[1].set()
    async with asyncio.timeout(120):
        while 2 not in await setting.policies.snapshots():
            await asyncio.sleep(0.01)
        # Its weights go once the snapshot is written and older ones are removed, which may last a version longer.
        for version in itertools.count(5):
            await setting.publication.wait_until_published()
            await setting.offer(version)
            if 2 not in setting.policy.gathered[-1][1]:
                return


async def test_a_snapshot_that_was_removed_is_no_longer_named(setting: Setting) -> None:
    await setting.offer(1)
    await setting.publication.wait_until_published()
    record = await setting.policies.get(1)
    assert record.snapshot_path
    await setting.policies.record_snapshots({2: "/snapshots/2"})
    await setting.policies.add_marks([record])
    assert record.snapshot_path == ""
    assert await setting.policies.snapshots() == {2: "/snapshots/2"}
