"""The Redis users of users.acl: each role can do its own work on the queue, and nothing else."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import BreakerConfig, RedisConfig, ReplayConfig, SessionLimits
from penstock.diagnosis.facts import RunStores
from penstock.errors import PenstockError
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease, SavedTokens
from penstock.replay.results import PromptBook
from penstock.sessions.session_store import Reward, SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store.fleet import Fleet, PolicyRegistry, Quarantine, Quarantines, RunControl, ServerRecord
from penstock.store.heartbeats import Heartbeats, Phases
from penstock.store.notices import Event, Notices
from penstock.store.redis_client import connect
from penstock.v1 import policies_pb2, tasks_pb2
from penstock_services.gateway.metrics import RunSnapshot
from support.redis_server import SCRIPTS, redis_with_users

ROLES = ("gateway", "rollout", "learner")
USERS = (*ROLES, "operator")
REFUSED = "permission|DEBUG command not allowed|can't run this command|can't access at least one of the keys"
Clients = dict[str, Redis]


def password_of(role: str) -> str:
    """A password that a URL, a shell, sed or printf would read as something else."""
    return f"{role} p@s:s/w#o%s?r&d$(id)\\n'\"`*"


@pytest.fixture(scope="module")
def acl_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Redis as compose and the chart start it, with the passwords of `password_of`."""
    passwords = {role: f"{password_of(role)}\n" for role in USERS}
    with redis_with_users(tmp_path_factory.mktemp("acl"), passwords) as port:
        yield port


@pytest.fixture
async def clients(acl_redis: int, tmp_path: Path) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        opened: Clients = {}
        for role in USERS:
            password = tmp_path / f"{role}-password"
            password.write_text(password_of(role))
            url = f"redis://127.0.0.1:{acl_redis}/0"
            opened[role] = connect(RedisConfig(url=url, username=role, password_file=password))
        for client in opened.values():
            stack.push_async_callback(client.aclose)
        yield opened


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    """Each test has a run of its own: the tests share one Redis and none of its keys."""
    return request.node.originalname


@pytest.fixture
def queues(clients: Clients, run: str) -> Callable[[str], RedisReplayQueue]:
    config = ReplayConfig(groups_per_step=8, max_staleness=1, max_attempts=2)
    return lambda role: RedisReplayQueue(clients[role], run, config)


async def test_every_user_can_find_out_whether_its_redis_is_the_primary(clients: Clients) -> None:
    for user, client in clients.items():
        answer = await client.execute_command("HELLO")
        assert b"master" in (answer.values() if isinstance(answer, dict) else answer), user


async def test_the_breaker_opens_is_seen_and_is_closed(
    clients: Clients, queues: Callable[[str], RedisReplayQueue], run: str
) -> None:
    gateway, rollout, _ = (queues(role) for role in ROLES)
    await gateway.submit([b"p"] * 8, [0] * 8, "")
    failed = [await rollout.give_back("r0", lease, "non_finite") for lease in await rollout.lease("r0", 8)]
    assert failed == [False] * 7 + [True]
    for user in ("gateway", "operator"):
        [breaker] = await RunControl(clients[user], run).open_breakers()
        assert breaker.server_id == "r0"
    await RunControl(clients["gateway"], run).resume()
    [lease] = await rollout.lease("r0", 1)
    assert await rollout.append(lease, b"group", 0) == "accepted"


async def test_the_gateway_keeps_sessions_and_hands_out_tasks(clients: Clients, run: str) -> None:
    sessions = SessionStore(clients["gateway"], run, 60, SessionLimits())
    tasks = TaskStore(clients["gateway"], run, 60, SessionLimits(task_max_failures=1))
    await tasks.submit(
        [
            tasks_pb2.NewTask(task_id="t", payload_json="1", num_sessions=2, deadline_s=900),
            tasks_pb2.NewTask(task_id="u", payload_json="1", num_sessions=1),
        ],
        "key",
    )
    for lease in await tasks.lease("w", 9, 9):
        await sessions.open(lease.session_id)
        await sessions.record(lease.session_id, b"call", lease.session_id)
        assert await tasks.heartbeat([lease.session_id]) == []
    assert await tasks.give_back("u.0.1", "broken") and (await tasks.get("u")).state == tasks_pb2.Task.FAILED
    for session_id in ("t.0.1", "t.1.1"):
        await sessions.close(session_id, Reward(1.0, {}))
        assert len(await sessions.calls(session_id)) == 1
    await tasks.sweep()
    assert await sessions.due() == []
    await sessions.finish("task:t", ["t.0.1", "t.1.1"], [1])
    assert (await tasks.get("t")).state == tasks_pb2.Task.FINISHED and (await tasks.stat()).conservation_error == 0


async def test_a_pinned_evaluation_is_abandoned(clients: Clients, run: str) -> None:
    config = ReplayConfig(groups_per_step=8, max_attempts=2, breaker=BreakerConfig(failures=4, probe_s=0.01))
    gateway, rollout = (RedisReplayQueue(clients[role], run, config) for role in ("gateway", "rollout"))
    await Fleet(clients["rollout"], run).join(ServerRecord("r0", "127.0.0.1:1", "torch", policy_version=0))
    for name in ("r0", "e"):
        await PolicyRegistry(clients["gateway"], run).pin(name, 0)
    await gateway.create_evaluation("e", [b"q"] * 4)
    async with asyncio.timeout(60):
        while (await gateway.get_evaluation("e")).num_failed < 4:
            for lease in await rollout.lease("r0", 4):
                await rollout.give_back("r0", lease, "oops")
            await asyncio.sleep(0.01)


async def test_admissions_that_redis_has_lost_are_restored(clients: Clients, run: str) -> None:
    config = ReplayConfig(stale_policy="wait")
    gateway, rollout = (RedisReplayQueue(clients[role], run, config) for role in ("gateway", "rollout"))
    first, second = (await gateway.submit([b"p"] * 2, [0] * 2, "")).prompt_ids
    assert await rollout.append(Lease(second, 1, b"p"), b"group", 0) == "accepted"
    [lease] = await rollout.lease("r0", 8)
    assert lease.prompt_id == first
    assert (await gateway.stat()).conservation_error == 0


async def test_a_quarantine_begins_is_seen_is_probed_and_ends(
    clients: Clients, queues: Callable[[str], RedisReplayQueue], run: str
) -> None:
    gateway, rollout, learner = (queues(role) for role in ROLES)
    term = await learner.take_term(0)
    await gateway.submit([b"p"] * 4, [0] * 4, "")
    await Fleet(clients["rollout"], run).join(ServerRecord("r0", "127.0.0.1:1", "torch"))
    quarantines = Quarantines(clients["learner"], run)
    await quarantines.put(Quarantine("r0", 0.2, 0.1, 3, since_ms=await quarantines.now_ms(), probes_left=1), term)
    assert len(await rollout.lease("r0", 4)) == 1
    for user in ("learner", "gateway", "operator"):
        [record] = (await RunControl(clients[user], run).quarantines()).values()
        assert len(record.probe_ids) == 1
    await quarantines.end("r0", term)
    assert len(await rollout.lease("r0", 4)) == 3
    await Fleet(clients["rollout"], run).leave("r0")


async def test_each_role_can_do_its_work(clients: Clients, queues: Callable[[str], RedisReplayQueue], run: str) -> None:
    gateway, rollout, learner = (queues(role) for role in ROLES)
    submitted = (await gateway.submit([b"p"] * 6, [0, 0, 0, 0, 0, 1], "key")).prompt_ids
    assert (await gateway.feed("train", "f", 0, [], [])).position == 0
    await learner.take_term(0)
    assert await learner.rewind_step(0, 0) == {}
    assert await learner.feeds() == {}
    await learner.publish(0, 0, policies_pb2.Policy(policy_version=0).SerializeToString())

    await rollout.wait_for_prompts(1)
    leases = await rollout.lease("r0", 8)
    assert len(leases) == 6
    assert await rollout.heartbeat("r0", leases) == []
    await rollout.give_back("r0", leases[5])
    for _ in range(2):
        again = await rollout.lease("r0", 1)
        await rollout.give_back("r0", again[0], failure="oops")
    for lease in leases[:5]:
        assert await rollout.append(lease, b"group", 0) == "accepted"
    assert await rollout.reconcile(leases[:5]) is not None
    assert await gateway.get_group(leases[0].prompt_id) == b"group"

    await learner.wait_for_groups(1)
    taken = await learner.take(1, 4)
    assert [delivery.payload for delivery in await learner.fetch(taken)] == [b"group"] * 4
    assert len(await learner.prompts(taken)) == 4
    assert await gateway.taken() == set(taken)
    for version in (0, 1):
        await PolicyRegistry(clients["learner"], run).record_snapshots({version: f"/snapshots/{version}"})
    assert await PolicyRegistry(clients["gateway"], run).snapshots() == {1: "/snapshots/1"}
    assert await PolicyRegistry(clients["learner"], run).promoted_version() is None
    await learner.expire(taken[2])
    await learner.dead_letter(taken[3], "checksum")
    [straggler] = await learner.take(1, 1)
    await learner.discard(straggler, "no_spread")
    assert await gateway.expired_reasons() == {"stale": 1, "no_spread": 1}
    assert await learner.commit(1, taken[:2]) == 2
    assert (await learner.committed()).step == 1
    await learner.rewind("/checkpoints/0", 0, taken[:2])
    assert (await learner.stat()).trained == 0
    again = [lease for lease in await rollout.lease("r0", 8) if lease.prompt_id in taken[:2]]
    assert [await rollout.append(lease, b"group", 0) for lease in again] == ["accepted"] * 2
    assert await learner.commit(1, await learner.take(1, 8)) == 2
    assert await learner.allocate_version(1) == 1
    assert (await learner.stat()).conservation_error == 0

    assert (await gateway.feed("train", "f", 0, [b"p"], [0])).position == 1
    assert (await learner.feeds())["train"].position == 1
    await learner.finish(1)
    await gateway.record_scores(1, {"math/reward/mean@1": 1.0})
    await gateway.create_evaluation("e-1", [b"q"])
    evaluation = next(lease for lease in await rollout.lease("r0", 8) if lease.prompt_id not in submitted)
    await rollout.record_evaluation("e-1", evaluation, [1.0], 0, 0, kept_group=b"group")
    assert (await learner.kept_groups("e-1")).prompt_ids == (evaluation.prompt_id,)
    assert await learner.fetch_kept("e-1", [evaluation.prompt_id]) == [b"group"]
    await learner.forget_kept("e-1")
    await learner.record_scores(1, {"math/reward_model/mean@1": 0.5})
    assert (await gateway.get_evaluation("e-1")).num_finished == 1
    assert await learner.evaluation_history() == await gateway.evaluation_history() == {
        "math/reward/mean@1-1": 1.0, "math/reward_model/mean@1-1": 0.5, "e-1": 1.0,
    }  # fmt: skip
    assert (await gateway.get_prompt(taken[0])).state == "trained"
    results = await PromptBook(gateway.client, gateway.run).wait_for_results("0-0", timeout_s=1)
    assert {result.state for result in results} == {"queued", "dead_lettered"}
    assert sum((await gateway.dead_letter_reasons()).values()) == 2
    assert (await gateway.stat()).trained == 2

    fleets = {role: Fleet(clients[role], run) for role in ROLES}
    await fleets["rollout"].join(ServerRecord("r0", "127.0.0.1:1", "torch"))
    await fleets["learner"].set_state("r0", "READY", learner.term)
    assert await fleets["rollout"].term() == learner.term
    assert [server.state for server in await fleets["learner"].servers()] == ["READY"]
    assert [server.state for server in await fleets["gateway"].servers()] == ["READY"]
    await fleets["rollout"].leave("r0")
    await Heartbeats(clients["rollout"], run).count_start("r0")
    await Notices(clients["rollout"], run).record(Event("reward_failed", "place", "text"))
    await Notices(clients["learner"], run).record(Event("reward_failed", "place", "text"))
    assert await fleets["learner"].forget_silent(900, learner.term) == {}
    for role, part in (("rollout", "r0"), ("learner", "learner")):
        await Phases(clients[role], run).enter(part, "starting", is_first=True)
    await RunControl(clients["learner"], run).pause("rewards fail")
    for user in ("gateway", "operator"):
        assert await RunControl(clients[user], run).pause_reason() == "rewards fail"
        assert [notice.count for notice in await Notices(clients[user], run).newest_first()] == [2]
    assert set(await Phases(clients["gateway"], run).by_component()) == {"r0", "learner"}
    await RunControl(clients["gateway"], run).resume()
    async with Heartbeats(clients["gateway"], run).beating("validator"):  # the feed has the user of the gateway
        assert "validator" in await Heartbeats(clients["learner"], run).ages_s()
    async with Heartbeats(clients["learner"], run).beating("learner"):
        config = RunConfig(run=run, model=ModelConfig(path=Path("m")))
        snapshot = await RunSnapshot.take(RunStores.of(clients["gateway"], config), config)
    assert set(snapshot.facts.ages_s) == {"learner"} and snapshot.scores == {
        "math/reward/mean@1": 1.0, "math/reward_model/mean@1": 0.5, "e": 1.0,
    }  # fmt: skip
    assert snapshot.restarts == {"r0": 0, "learner": 0, "validator": 0}
    assert snapshot.redis_memory and 0 < snapshot.redis_memory.used_bytes < snapshot.redis_memory.limit_bytes
    for role in ("gateway", "rollout"):
        assert (await PolicyRegistry(clients[role], run).get()).policy_version == 0
        assert await clients[role].ping()


@pytest.mark.parametrize("role", USERS)
@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "FLUSHDB", "CONFIG GET *", "DEBUG SLEEP 0", "RESTORE k 0 v", "KEYS *", "SCAN 0", "ACL LIST",
     "SHUTDOWN", "SCRIPT FLUSH", "MIGRATE h 1 k 0 1", "MONITOR", "GET other", "HGET other:{acl}:counters term"],
)  # fmt: skip
async def test_no_user_reaches_beyond_the_queue(clients: Clients, role: str, command: str) -> None:
    with pytest.raises((NoPermissionError, ResponseError), match=REFUSED):
        await clients[role].execute_command(*command.split())


async def test_a_producer_reads_no_groups_and_no_manifests(
    clients: Clients, queues: Callable[[str], RedisReplayQueue], run: str
) -> None:
    prefix = f"penstock:{{{run}}}:"
    await queues("gateway").submit([b"p"], [0], "")
    rollout = queues("rollout")
    lease = (await rollout.lease("reader", 8))[-1]
    saved = SavedTokens(0, 0, b"tokens")
    assert await rollout.save_tokens("reader", [(lease, saved), (lease, saved)]) == []
    assert await rollout.saved_tokens(lease) == [saved], "what it has saved, it reads"
    await rollout.append(lease, b"group", 0)
    key = f"{prefix}group:{lease.prompt_id}:{lease.attempt}"
    for words in (("GET", key), ("MGET", key), ("HGETALL", f"{prefix}prompts"), ("HGET", f"{prefix}manifests", "1")):
        with pytest.raises(NoPermissionError):
            await clients["rollout"].execute_command(*words)
    with pytest.raises(ResponseError, match=REFUSED):
        await clients["rollout"].eval("return redis.call('GET', KEYS[1])", 1, key)


async def test_the_gateway_commits_nothing_and_the_learner_leases_nothing(
    clients: Clients, queues: Callable[[str], RedisReplayQueue], run: str
) -> None:
    with pytest.raises(NoPermissionError):
        await clients["gateway"].unlink(f"penstock:{{{run}}}:manifests")
    with pytest.raises(NoPermissionError):
        await clients["gateway"].flushdb()
    gateway, learner = queues("gateway"), queues("learner")
    await learner.take_term(0)
    gateway.term = learner.term  # with the right term, only the rights of its user refuse the commit
    with pytest.raises(PenstockError, match=REFUSED):
        await gateway.commit(1, [1])
    with pytest.raises(PenstockError, match=REFUSED):
        await learner.lease("l", 1)


async def test_a_role_without_its_password_is_not_let_in(acl_redis: int) -> None:
    for user in ("gateway:wrong", "default:", ":"):
        client = connect(RedisConfig(url=f"redis://{user}@127.0.0.1:{acl_redis}/0"))
        with pytest.raises(AuthenticationError):
            await client.ping()
        await client.aclose()


def test_start_refuses_a_missing_password(tmp_path: Path) -> None:
    (tmp_path / "redis-gateway-password").write_text("x")
    result = subprocess.run(
        ["sh", str(SCRIPTS / "start.sh"), str(SCRIPTS / "users.acl"), str(tmp_path), str(tmp_path)],
        env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "redis-rollout-password is missing or empty" in result.stderr
