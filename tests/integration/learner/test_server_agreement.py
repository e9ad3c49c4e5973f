"""Servers whose log-probs disagree are kept out of training, probed, and let in again; the run ends only if all do."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis.asyncio as redis
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from penstock.errors import ConfigError
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, Quarantines, ServerRecord
from penstock.trajectory import Group, Trajectory, VersionSegment
from penstock_learner.agreement.servers import (
    NUM_PROBES,
    RELOADS_THAT_FAILED,
    STRIKES,
    LogProbCheck,
    ServerAgreement,
    ServerQuarantine,
)
from penstock_learner.metrics import OTHER_SERVERS, LearnerMetrics
from penstock_learner.term import MAX_REWINDS, Rewind, Term
from support.groups import make_group


class Policy:
    """Replaces the policy's ranks."""

    num_computed = 0

    async def policy_log_probs(self, groups: Sequence[Group]) -> NDArray[np.float32]:
        self.num_computed += len(groups)
        return np.concatenate([log_probs_of(t) for group in groups for t in group.trajectories])


def log_probs_of(trajectory: Trajectory) -> NDArray[np.float32]:
    return -trajectory.token_ids.astype(np.float32) / 32


class Setting:
    """A fleet of the servers `a` and `b`, and the steps of a term."""

    def __init__(self, client: redis.Redis, term: int, check: LogProbCheck) -> None:
        self.fleet = Fleet(client, "test")
        self.policy: Any = Policy()
        self.off: dict[str, float] = {}
        """By how many nats per token the log-probs of a server are wrong."""
        self.metrics = LearnerMetrics(CollectorRegistry(), "standalone")
        self.quarantine = ServerQuarantine(Quarantines(client, "test"), term)
        self.check = check
        self.agreement = ServerAgreement(
            check, self.quarantine, self.policy.policy_log_probs, self.fleet, self.metrics, 600.0
        )
        self.step = 0
        self.next_id = 0

    async def join(self, *servers: str) -> None:
        for server in servers:
            await self.fleet.join(ServerRecord(server, "127.0.0.1:1", "torch"))

    def group(self, server: str, version: int) -> Group:
        self.next_id += 1
        group = make_group(self.next_id, num_samples=8)
        off = np.float32(self.off.get(server, 0.0))
        trajectories = (
            replace(t, log_probs=log_probs_of(t) - off, segments=(VersionSegment(0, len(t.token_ids), version),))
            for t in group.trajectories
        )
        return replace(group, server_id=server, trajectories=tuple(trajectories))

    async def train(self, *servers: str, staleness: int = 0) -> list[str]:
        """One step with a group of each server. Returns the servers whose groups were refused."""
        self.step += 1
        version = self.step - 1
        groups = [self.group(server, version - staleness) for server in servers]
        refused = await self.agreement.refused(self.step, groups, Term(policy_version=version))
        return [group.server_id for group in groups if group.prompt_id in refused]

    async def probe(self, server: str) -> list[str]:
        """One step with a group that the server sampled as a probe, after its weights were loaded again."""
        await self.quarantine.loaded(server, self.step)
        record = self.quarantine.records[server]
        assert record.probes_left == NUM_PROBES
        leased = replace(record, probes_left=0, probe_ids=frozenset({self.next_id + 1}))  # as lease.lua does
        await self.quarantine.store.put(leased, self.quarantine.term)
        return await self.train(server)


@pytest.fixture
async def setting(redis_client: redis.Redis, queue: RedisReplayQueue) -> AsyncIterator[Setting]:
    made = Setting(redis_client, await queue.take_term(0), LogProbCheck(0.1))
    await made.agreement.begin()
    yield made


async def test_a_server_that_disagrees_is_kept_out_and_let_in_when_its_probes_agree(setting: Setting) -> None:
    await setting.join("a", "b")
    assert await setting.train("a", "b") == []
    setting.off["b"] = 0.3
    assert await setting.train("a", "b", "b") == ["b", "b"]
    [record] = (await setting.quarantine.store.read()).values()
    assert (record.server_id, record.num_reloads) == ("b", 0)
    assert (record.mismatch_nats, record.limit_nats) == pytest.approx((0.3, 0.1), abs=1e-4)
    late = setting.group("b", 1)
    assert await setting.quarantine.refuses(late), "what it sampled before is refused when it arrives"
    assert await setting.train("a", "b") == ["b"], "and from a batch that was read ahead"

    assert await setting.probe("b") == ["b"], "its probe disagrees too"
    assert setting.quarantine.records["b"].num_reloads == 1
    assert not setting.quarantine.is_due(ServerRecord("b", "", "torch")), "it waits before it is loaded again"
    setting.off["b"] = 0.0
    assert await setting.probe("b") == []
    assert await setting.quarantine.store.read() == {}
    assert await setting.train("a", "b") == []
    assert setting.metrics.quarantines._value.get() == 1


async def test_the_drift_is_forgotten_after_each_rewind_of_a_run_with_many(setting: Setting) -> None:
    """A term remembers the newest rewinds only, so their number stays the same."""
    await setting.join("a")
    term = Term(lineage=tuple(Rewind(0, 1, "restart") for _ in range(MAX_REWINDS)))
    for step in (1, 2):
        await setting.agreement.refused(step, [setting.group("a", 1)], term)
    assert setting.check._drifts, "nothing was rewound between the two"
    term.rewind(from_version=1, to_version=2)
    await setting.agreement.refused(3, [setting.group("a", 2)], term)
    assert not setting.check._drifts


async def test_the_run_ends_only_if_every_server_disagrees(setting: Setting) -> None:
    await setting.join("a", "b")
    setting.off = {"a": 0.3, "b": 0.4}
    assert await setting.train("a") == ["a"], "nobody has compared the other one"
    with pytest.raises(ConfigError, match=r"more than 0\.1, .* servers: a by 0\.3, b by 0\.4"):
        await setting.train("b")
    assert "b" not in await setting.quarantine.store.read()


async def test_the_only_server_is_loaded_again_before_the_run_ends(setting: Setting) -> None:
    await setting.join("a")
    assert await setting.train("a") == []
    setting.off["a"] = 0.3
    assert await setting.train("a") == ["a"]
    for _ in range(RELOADS_THAT_FAILED - 1):
        assert await setting.probe("a") == ["a"]
    with pytest.raises(ConfigError, match="rollout engines and learner disagree by 0.3 nats"):
        await setting.probe("a")


async def test_without_a_fleet_the_first_step_decides(setting: Setting) -> None:
    setting.off["import"] = 0.3
    with pytest.raises(ConfigError, match="disagree by 0.3 nats"):
        await setting.train("import")
    setting.off["import"] = 0.0
    assert await setting.train("import") == []
    setting.off["import"] = 0.3
    assert await setting.train("import") == [], "such groups cannot be sampled again"


async def test_a_missed_update_is_found_in_samples_of_older_versions(setting: Setting) -> None:
    await setting.join("a", "b")
    for _ in range(4):
        assert await setting.train("a", "b", staleness=0 if setting.step == 0 else 1) == []
    setting.off["b"] = 0.05
    refused = [await setting.train("a", "b", staleness=1) for _ in range(STRIKES)]
    assert refused == [[]] * (STRIKES - 1) + [["b"]]


async def test_the_only_server_left_serves_on_within_the_configured_limit(setting: Setting) -> None:
    await setting.join("a")
    for _ in range(4):
        await setting.train("a")
    setting.off["a"] = 0.05
    assert [await setting.train("a") for _ in range(STRIKES)][-1] == ["a"]
    assert await setting.probe("a") == []
    assert await setting.train("a") == []


async def test_a_difference_that_all_servers_show_is_not_their_fault(setting: Setting) -> None:
    await setting.join("a", "b")
    for _ in range(4):
        await setting.train("a", "b")
    setting.off = {"a": 0.05, "b": 0.05}
    assert [await setting.train("a", "b") for _ in range(3 * STRIKES)] == [[]] * (3 * STRIKES)


async def test_probes_that_could_not_be_compared_are_asked_for_again(setting: Setting) -> None:
    await setting.join("a", "b")
    setting.off["b"] = 0.3
    assert await setting.train("a", "b") == ["b"]
    await setting.quarantine.loaded("b", setting.step)
    leased = replace(setting.quarantine.records["b"], probes_left=0, probe_ids=frozenset({setting.next_id + 1}))
    await setting.quarantine.store.put(leased, setting.quarantine.term)
    assert await setting.train("b", staleness=40) == ["b"]
    assert setting.quarantine.records["b"].probes_left == NUM_PROBES


async def test_what_a_server_sampled_before_its_weights_were_loaded_is_refused_afterwards_too(setting: Setting) -> None:
    await setting.join("a", "b")
    await setting.train("a", "b")
    setting.off["b"] = 0.3
    assert await setting.train("a", "b") == ["b"]
    late = setting.group("b", 1)
    setting.off["b"] = 0.0
    assert await setting.probe("b") == []
    assert not setting.quarantine.holds("b")
    assert await setting.quarantine.refuses(late)
    assert not await setting.quarantine.refuses(setting.group("b", setting.step))


async def test_another_probe_follows_one_that_is_discarded(setting: Setting) -> None:
    await setting.join("a", "b")
    setting.off["b"] = 0.3
    await setting.train("a", "b")
    await setting.quarantine.loaded("b", setting.step)
    await setting.quarantine.one_more_probe(setting.group("b", 1))
    await setting.quarantine.one_more_probe(setting.group("a", 1))
    assert (await setting.quarantine.store.read())["b"].probes_left == NUM_PROBES + 1


async def test_a_term_without_comparisons_ends_all_quarantines(setting: Setting) -> None:
    await setting.join("a", "b")
    setting.off["b"] = 0.3
    assert await setting.train("a", "b") == ["b"]
    setting.check.max_mismatch_nats = 0.0
    await setting.agreement.begin()
    assert await setting.quarantine.store.read() == {}


async def test_zero_compares_nothing(redis_client: redis.Redis, queue: RedisReplayQueue) -> None:
    setting = Setting(redis_client, await queue.take_term(0), LogProbCheck(0.0))
    await setting.join("a")
    setting.off["a"] = 50.0
    assert await setting.train("a") == []
    assert setting.policy.num_computed == 0


async def test_the_metrics_have_few_series(setting: Setting) -> None:
    await setting.join("a", "b")
    await setting.train("a", "b", "gone")
    await setting.fleet.leave("b")
    await setting.train("a", "session")
    series = {
        sample.labels["server"] for family in setting.metrics.server_mismatch.collect() for sample in family.samples
    }
    assert series == {"a", OTHER_SERVERS}


async def test_a_server_that_still_generates_is_loaded_after_a_while(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    await setting.join("a", "b")
    setting.off["b"] = 0.3
    await setting.train("a", "b")
    busy = ServerRecord("b", "", "torch", running_groups=3)
    assert not setting.quarantine.is_due(busy) and setting.quarantine.is_due(replace(busy, running_groups=0))
    assert not setting.quarantine.is_due(replace(busy, server_id="a", running_groups=0))
    later = time.monotonic() + 61
    monkeypatch.setattr("penstock_learner.agreement.servers.time.monotonic", lambda: later)
    assert setting.quarantine.is_due(busy)
