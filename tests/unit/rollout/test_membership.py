"""A rollout server's moves between the states of the fleet, and the version it serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.config.loading import load_overrides
from penstock.errors import NotFound, WeightPushFailed
from penstock.store.fleet import Reported, ServerState
from penstock.v1 import policies_pb2
from penstock_rollout.fleet import membership as membership_module
from penstock_rollout.fleet.membership import FleetMembership, WeightMember
from penstock_rollout.metrics import RolloutMetrics


class Registry:
    """The fleet and the policies of a run, in memory. Every published version has a snapshot."""

    def __init__(self) -> None:
        self.moves: list[ServerState] = []
        self.current: int | None = None
        self.held: int | None = None
        self.pinned: int | None = None

    async def set_state(self, server_id: str, state: ServerState) -> None:
        self.moves.append(state)

    async def get(self, version: int | None) -> policies_pb2.Policy:
        version = self.current if version is None else version
        if version is None:
            raise NotFound("nothing is published")
        return policies_pb2.Policy(policy_version=version, snapshot_path=f"/snapshots/{version}")


class Engine:
    policy_version = 0


class Server:
    """A membership over a registry. Loading a snapshot moves the engine at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Path, catch_up: str = "publisher") -> None:
        config = load_overrides({"model": {"path": str(model)}}, ["--weights.catch_up", catch_up])
        self.registry, self.engine = Registry(), Engine()
        registry: Any = self.registry
        engine: Any = self.engine
        metrics = RolloutMetrics(CollectorRegistry())
        self.weight_member = WeightMember("test", engine, metrics, read_term=lambda: asyncio.sleep(0, result=1))
        self.membership = FleetMembership(config, "rollout-0", engine, registry, registry, self.weight_member, metrics)
        self.loaded: list[int] = []
        self.refuses = False

        async def load_snapshot(engine: Any, wanted: policies_pb2.Policy, timeout_s: float) -> None:
            self.loaded.append(wanted.policy_version)
            if self.refuses:
                raise WeightPushFailed("the snapshot is gone")
            engine.policy_version = wanted.policy_version

        monkeypatch.setattr(membership_module, "load_snapshot", load_snapshot)

    async def report(self, recorded: ServerState | None) -> ServerState:
        held = self.registry.pinned if self.registry.held is None else self.registry.held
        return await self.membership._next_state(Reported(recorded, held, self.registry.current or 0))


async def test_a_server_joins_with_the_model_folder_before_anything_is_published(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(monkeypatch, tmp_path)
    assert await server.report("JOINING") == "READY"
    assert server.registry.moves == ["STALE", "READY"]
    assert await server.report(None) == "READY", "a record that Redis lost is made again"


async def test_a_server_that_is_behind_waits_for_a_push_or_loads_a_snapshot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waiting, loading = Server(monkeypatch, tmp_path), Server(monkeypatch, tmp_path, catch_up="snapshot")
    waiting.registry.current = loading.registry.current = 3
    assert await waiting.report("EVICTED") == "STALE"
    waiting.engine.policy_version = 3
    assert await waiting.report("STALE") == "READY"
    assert await loading.report("EVICTED") == "READY" and loading.loaded == [3]


@pytest.mark.parametrize("order", ["held", "pinned"])
async def test_a_held_server_loads_its_version_and_the_current_one_when_released(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, order: str
) -> None:
    server = Server(monkeypatch, tmp_path)
    server.registry.current = server.engine.policy_version = 5
    assert await server.report("READY") == "READY"
    setattr(server.registry, order, 2)
    assert await server.report("READY") == "READY"
    assert server.engine.policy_version == 2 and server.registry.moves == ["STALE", "READY"]
    setattr(server.registry, order, None)
    assert await server.report("READY") == "STALE", "the next push brings the current version"
    assert await server.report("STALE") == "STALE"


async def test_a_server_that_became_ready_during_a_push_without_it_catches_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The push of version 4 begins while the server is EVICTED, and ends after the server has found itself at the
    current version, 3, and before its move to READY is stored."""
    server = Server(monkeypatch, tmp_path)
    server.registry.current = server.engine.policy_version = 3
    set_state = server.registry.set_state

    async def published_meanwhile(server_id: str, state: ServerState) -> None:
        if state == "READY":
            server.registry.current = 4
        await set_state(server_id, state)

    monkeypatch.setattr(server.registry, "set_state", published_meanwhile)
    assert await server.report("EVICTED") == "READY"
    assert await server.report("READY") == "STALE", "the learner sends the current version to STALE servers"
    server.engine.policy_version = 4
    assert await server.report("STALE") == "READY"


@pytest.mark.parametrize("state", ["READY", "LOADING"])
async def test_a_server_that_is_ahead_of_the_published_version_goes_on_serving(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: ServerState
) -> None:
    """A push commits before its version is published."""
    server = Server(monkeypatch, tmp_path)
    server.registry.current, server.engine.policy_version = 3, 4
    assert await server.report(state) == state and server.registry.moves == []


async def test_a_snapshot_is_not_loaded_during_a_push_and_a_refused_one_not_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server(monkeypatch, tmp_path, catch_up="snapshot")
    server.registry.current, server.refuses = 3, True
    server.weight_member._begin_push(60.0)
    assert await server.report("STALE") == "STALE" and server.loaded == []
    server.weight_member._end_push()
    assert await server.report("STALE") == "STALE"
    assert await server.report("STALE") == "STALE" and server.loaded == [3]


async def test_the_version_of_the_metrics_is_that_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A push whose publisher has given up still loads its version, and no answer of it sets the metric."""
    server = Server(monkeypatch, tmp_path)
    server.registry.current = server.engine.policy_version = 7
    metrics = server.membership.metrics
    server.membership._enter(await server.report("EVICTED"))
    assert (metrics.version.labels("rollout")._value.get(), metrics.pinned._value.get()) == (7, 0)
    server.registry.pinned = 7
    server.membership._enter(await server.report("READY"))
    assert metrics.pinned._value.get() == 1


async def test_waiting_for_a_push_ends_with_the_push_or_its_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    member = Server(monkeypatch, tmp_path).weight_member
    async with asyncio.timeout(60):
        await member.wait_for_push(3600.0)
        member._begin_push(0.01)
        await member.wait_for_push(3600.0)
        member._begin_push(3600.0)
        await member.wait_for_push(0.01)
        waiting = asyncio.create_task(member.wait_for_push(3600.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        member._end_push()
        await waiting
