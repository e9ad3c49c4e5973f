"""Every Lua script does all of its work or none, whatever fails inside it: support/script_faults.py has the faults.

The scripts are called through the project's own classes, so each is checked in the states in which it really runs.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from penstock.codec import encode_prompt
from penstock.config.service import BreakerConfig, RedisConfig, ReplayConfig, SessionLimits
from penstock.errors import Conflict, NotFound, PenstockError, QueueFull
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import FinishedGroup, Lease, OfferedGroup, Origin, PromptRequest, SavedTokens
from penstock.replay.results import PromptBook
from penstock.sessions.session_store import Reward, SessionStore
from penstock.sessions.task_store import TaskStore
from penstock.store import redis_client
from penstock.store.fleet import Fleet, PolicyRegistry, Quarantine, Quarantines, RunControl, ServerRecord
from penstock.store.heartbeats import Heartbeats, Phases
from penstock.store.notices import Event, Notices
from penstock.store.redis_client import QUEUE, RedisClient, Script, ScriptFolder, connect
from penstock.trajectory import Prompt
from penstock.v1 import tasks_pb2
from support.groups import make_group
from support.redis_server import RedisProcess
from support.script_faults import WRITES, Case, ScriptFaults, script_names

ROOT = Path(redis_client.__file__).parents[2]
PRODUCT = ("penstock", "rollout_server", "learner", "services", "tools")
PROMPT = encode_prompt(Prompt(messages=(("user", "?"),), priority=1))


def make_queue(client: RedisClient, **settings: object) -> RedisReplayQueue:
    defaults: dict[str, object] = {"groups_per_step": 4, "max_staleness": 3, "max_attempts": 2, "lease_ttl_s": 3600}
    config = ReplayConfig.model_validate(defaults).model_copy(update=settings)
    return RedisReplayQueue(client, "test", config)


async def train(client: RedisClient, **settings: object) -> None:
    """Prompts from their submission to their commit, and a rewind."""
    queue = make_queue(client, **settings)
    fleet, quarantines = Fleet(client, "test"), Quarantines(client, "test")
    await queue.store_id()
    await queue.take_term(0)
    await queue.submit([PROMPT] * 3, [0, 0, 1], "key")
    await queue.submit([PROMPT] * 3, [0, 0, 1], "key")
    requests = [PromptRequest([PROMPT] * 2, [0, 0], "other", digest="d"), PromptRequest([PROMPT], [0], "")]
    await queue.submit_many(requests, all_or_none=True)
    await queue.submit_many([replace(requests[0], digest="another"), requests[1]], all_or_none=True)
    await queue.feed("data", "print", 0, [], [], 4)
    for _ in range(2):
        await queue.feed("data", "print", 0, [PROMPT] * 4, [0] * 4, 4)
    await queue.record_scores(1, {"math": 1.0})
    leases = await queue.lease("s", 6)
    await queue.heartbeat("s", leases)
    pieces = [(lease, SavedTokens(sample, 0, b"tokens")) for lease in leases[:3] for sample in (0, 0, 1)]
    await queue.save_tokens("s", pieces)
    await queue.save_tokens("other", pieces)
    await queue.forget_tokens("s", leases[2])
    await queue.give_back("s", leases[5])
    await queue.append_many([FinishedGroup(lease, b"group", 2) for lease in leases[:3]])
    await queue.append(leases[0], b"group", 0)
    await queue.append(Lease(leases[1].prompt_id, 9, b""), b"group", 0)
    await queue.append(Lease(99, 1, b""), b"group", 0)
    await queue.append(leases[3], b"group", 1)
    await queue.append(leases[4], b"group", 1)
    await queue.reconcile(leases)
    await queue.wait_for_groups(0)
    taken = await queue.take(1, 3)
    queue._manifests.clear()
    assert await queue.take(1, 3) == taken, "as if the answer had been lost"
    await queue.fetch_located(taken)
    await queue.rewind_step(0, 0)
    inspection = QueueInspector(client, "test", queue.config)
    for selection in ("fifo", "freshest"):
        await inspection.queued_ids(selection, include_delivered=True)
    await inspection.report()
    assert await queue.commit(1, taken[:2]) == 2
    await queue.commit(1, taken[:2])
    await queue.get_prompt(taken[0])
    taken = await queue.take(2, 2)
    await queue.save_tokens("s", [(lease, SavedTokens(0, 0, b"tokens")) for lease in await queue.lease("s", 2)])
    await queue.commit(3, [*taken, 9], oldest_step=1)
    await queue.publish(await queue.allocate_version(1), 3, b"policy")
    await queue.rewind("/checkpoints/1", 1, taken)
    await fleet.join(ServerRecord("s", "127.0.0.1:1", "torch"))
    await queue.save_tokens("s", [(lease, SavedTokens(0, 0, b"tokens")) for lease in await queue.lease("s", 2)])
    await quarantines.put(Quarantine("s", 0.2, 0.1, 3, since_ms=1, probes_left=1), queue.term)
    await queue.lease("s", 4)
    await quarantines.end("s", queue.term)
    await queue.finish(3)
    assert (await queue.stat()).conservation_error == 0


async def drop(client: RedisClient) -> None:
    """Groups that are not trained: dropped, dead-lettered, cancelled, brought by someone else, refused."""
    queue, short = make_queue(client), make_queue(client, lease_ttl_s=0.001)
    book, inspection = PromptBook(client, "test"), QueueInspector(client, "test", queue.config)
    await queue.take_term(0)
    await queue.submit([PROMPT] * 12, [0] * 6 + [1] * 6, "")
    leases = await queue.lease("s", 8)
    await queue.save_tokens("s", [(lease, SavedTokens(0, 0, b"tokens")) for lease in leases])
    for lease in leases[:6]:
        await queue.append(lease, b"group", 0)
    taken = await queue.take(1, 4)
    for drop in (queue.expire, queue.discard, queue.dead_letter):
        await drop(taken.pop(), "no_spread")
    await queue.expire(leases[4].prompt_id)
    await book.cancel([leases[5].prompt_id, leases[6].prompt_id, *taken, 1, 2, 99])
    await queue.give_back("s", leases[7], "broken", is_final=True)
    letters = [letter async for letter in inspection.dead_letters()]
    for letter in letters:
        await inspection.requeue(letter.stream_id)
    await book.page(0, 20)
    for _ in range(2):
        await short.lease("dead", 2)
        await asyncio.sleep(0.01)
    await queue.lease("s", 1)
    offered = [OfferedGroup(number, PROMPT, number, make_group(1)) for number in range(2)]
    await queue.accept(offered, Origin("import", "rows"))
    await queue.accept(offered, Origin("import", "rows"))
    await make_queue(client, loss_window_s=0.01).accept(offered, Origin("import", "new rows"))
    assert (await queue.stat()).conservation_error == 0


async def lose_the_tail(client: RedisClient) -> None:
    """Groups whose prompts have no admission, in a queue that is full and in one that waits for the oldest."""
    waits = {"stale_policy": "wait"}
    for settings in (waits, waits | {"capacity_bytes": 1}, {"selection": "freshest"}):
        await client.flushdb()
        queue = make_queue(client, **settings)
        await queue.take_term(0)
        await queue.submit([PROMPT] * 6, [0] * 6, "")
        leases = await queue.lease("s", 2)
        lost = [FinishedGroup(Lease(prompt_id, 1, b""), b"group", 1) for prompt_id in (4, 6)]
        await queue.append_many([*lost, *(FinishedGroup(lease, b"group", 1) for lease in leases[::-1])])
        taken = await queue.take(1, 2)
        await queue.commit(1, [*taken[:1], 3])
        await queue.rewind("/checkpoints/0", 0, [*taken[:1], 3])
        assert (await queue.stat()).conservation_error == 0


async def wait_for_the_oldest(client: RedisClient) -> None:
    """A full queue accepts a group for which all that are ready wait, and asks again about the next one."""
    queue = make_queue(client, stale_policy="wait", capacity_bytes=1)
    await queue.take_term(0)
    await queue.submit([PROMPT] * 4, [0] * 4, "")
    *oldest, last = await queue.lease("s", 3)
    await queue.append(last, b"group", 0)
    await queue.append_many([FinishedGroup(lease, b"group", 0) for lease in oldest])
    assert (await queue.stat()).queued == 2


async def append_returned(client: RedisClient) -> None:
    """A group of a prompt whose lease was given back, with one whose lease is held."""
    queue = make_queue(client)
    await queue.submit([PROMPT] * 4, [0] * 4, "")
    leases = await queue.lease("s", 2)
    await queue.give_back("s", leases[0])
    await queue.append_many([FinishedGroup(lease, b"group", 0) for lease in leases])
    assert (await queue.stat()).conservation_error == 0


async def change_the_order(client: RedisClient) -> None:
    """Groups that were appended for one order and are taken in another, from a queue that is full."""
    queue, freshest = make_queue(client), make_queue(client, selection="freshest", capacity_bytes=1)
    freshest.term = await queue.take_term(0)
    await queue.submit([PROMPT] * 4, [0] * 4, "")
    for lease in await queue.lease("s", 4):
        await queue.append(lease, b"group", 1)
    assert len(await freshest.take(1, 2)) == 2


async def undo(client: RedisClient) -> None:
    """Prompts with priorities that are rewound and cancelled in every state."""
    queue, taken = make_queue(client, max_staleness=9), dict[int, list[int]]()
    await queue.take_term(0)
    await queue.submit([PROMPT] * 6, [5] * 6, "")
    leases = await queue.lease("s", 5)
    for lease in leases[:3]:
        await queue.append(lease, b"group", 1)
    await queue.give_back("s", leases[3], "oops")
    for step in (1, 2):
        taken[step] = await queue.take(step, 1)
        await queue.commit(step, taken[step], oldest_step=step - 1)
    await queue.rewind("/checkpoints/1", 1, taken[2])
    await PromptBook(client, "test").cancel([1, 2, 3, 4, 5, 6])
    assert (await queue.stat()).conservation_error == 0


async def fail_prompts(client: RedisClient) -> None:
    """Failures that count, that open a breaker, that a success counts, and probes."""
    breaker = BreakerConfig(failures=4, non_finite_failures=3, probe_s=0.001)
    queue = make_queue(client, breaker=breaker)
    await queue.take_term(0)
    await queue.publish(await queue.allocate_version(1), 1, b"policy")
    await queue.submit([PROMPT] * 8, [0] * 8, "")
    good, *leases = await queue.lease("a", 5)
    for lease in leases[:2]:
        await queue.give_back("a", lease, "oops", num_running=2, forget_saved=True)
    await queue.append(good, b"group", 0)
    for lease in await queue.lease("a", 4):
        await queue.give_back("a", lease, "oops", num_running=0)
    for lease in leases[2:]:
        await queue.give_back("a", lease, "non_finite", num_running=0)
    while not await queue.give_back("b", (await queue.lease("b", 1))[0], "non_finite"):
        pass
    await asyncio.sleep(0.01)
    [probe] = await queue.lease("b", 4)
    await queue.give_back("b", probe, "non_finite")
    await asyncio.sleep(0.01)
    [probe] = await queue.lease("b", 4)
    await queue.append(probe, b"group", 0)
    assert (await queue.stat()).conservation_error == 0


async def evaluate(client: RedisClient) -> None:
    """Held-out prompts: answered, failed, expired, pinned and abandoned."""
    queue, short = make_queue(client, max_attempts=1), make_queue(client, lease_ttl_s=0.001)
    await queue.submit([PROMPT] * 2, [0] * 2, "")
    await queue.create_evaluation("math-1", [PROMPT] * 4)
    await queue.create_evaluation("math-1", [PROMPT] * 4)
    leases = await queue.lease("s", 8)
    good, bad, *others = [lease for lease in leases if lease.prompt_id > 2]
    await queue.save_tokens("s", [(good, SavedTokens(0, 0, b"tokens"))])
    await queue.heartbeat("s", sorted(leases, key=lambda lease: lease.prompt_id))
    await queue.heartbeat("s", others)
    await queue.give_back("s", bad, "oops", num_running=3)
    for lease in (good, *others):
        await queue.record_evaluation("math-1", lease, [1.0, 0.0], 2, 3, "math", ["x", "y"], b"group")
    await queue.record_evaluation("math-1", good, [1.0], 0, 0)
    await queue.create_evaluation("code-1", [PROMPT] * 2)
    for _ in range(3):
        await short.lease("dead", 2)
        await asyncio.sleep(0.01)
    await short.lease("dead", 2)

    config = {"max_attempts": 2, "breaker": BreakerConfig(failures=4, probe_s=0.001)}
    queue = make_queue(client, **config)
    await Fleet(client, "test").join(ServerRecord("r0", "127.0.0.1:1", "torch", policy_version=0))
    for name in ("r0", "pinned"):
        await PolicyRegistry(client, "test").pin(name, 0)
    await queue.create_evaluation("pinned", [PROMPT] * 4)
    while (await queue.get_evaluation("pinned")).num_failed < 4:
        for lease in await queue.lease("r0", 4):
            await queue.give_back("r0", lease, "oops")
        await asyncio.sleep(0.002)
    assert (await queue.stat()).conservation_error == 0


async def serve_sessions(client: RedisClient) -> None:
    """Sessions and tasks: recorded, rewarded, returned, reclaimed, overdue."""
    sessions = SessionStore(client, "test", 3600, SessionLimits(task_lease_s=3600))
    tasks = TaskStore(client, "test", 3600, SessionLimits(task_max_failures=1, task_lease_s=3600))
    hasty = TaskStore(client, "test", 3600, SessionLimits(task_max_failures=2, task_lease_s=0.001))
    await tasks.submit(
        [
            tasks_pb2.NewTask(task_id="t", payload_json="1", num_sessions=3, deadline_s=9),
            tasks_pb2.NewTask(task_id="u", payload_json="1", num_sessions=1),
            tasks_pb2.NewTask(task_id="v", payload_json="1", num_sessions=2, deadline_s=0.001),
            tasks_pb2.NewTask(task_id="w", payload_json="1", num_sessions=2, deadline_s=5),
        ],
        "key",
    )
    await tasks.submit([tasks_pb2.NewTask(task_id="t", payload_json="1", num_sessions=1)], "key")
    await tasks.lease("w", 4, 2)
    for session_id in ("t.0.1", "t.1.1", "own", "late", "extra"):
        name, _ = await sessions.open(session_id)
        for call_id in ("one", "two"):
            await sessions.record(session_id, b"call", call_id, name)
            name, _ = await sessions.open(session_id)
    await tasks.heartbeat(["t.0.1", "t.1.1", "u.0.9"])
    await tasks.give_back("u.0.1", "broken")
    await sessions.summaries(0, 9)
    await sessions.read("own")
    with pytest.raises(NotFound):
        await sessions.close("unknown", Reward(1.0, {}))
    for session_id in ("t.0.1", "t.1.1", "own", "t.0.1"):
        await sessions.close(session_id, Reward(1.0, {}))
    await sessions.close("late", Reward(1.0, {}), "u")
    await sessions.close("extra", Reward(1.0, {}), "w")
    await sessions.record("calls", b"call", "one")
    await sessions.close("calls", Reward(1.0, {}), "t")
    with pytest.raises(Conflict):
        await sessions.record("own", b"call", "three")
    for _ in range(2):
        await hasty.lease("dead", 1, 9)
        await asyncio.sleep(0.01)
        await hasty.sweep()
        await hasty.lease("dead", 9, 9)
        await asyncio.sleep(0.01)
    await hasty.lease("dead", 1, 9)
    await asyncio.sleep(0.01)
    await hasty.sweep()
    await client.zadd(sessions.keys.finishing, {"session:own": 1})
    await client.zadd(sessions.keys.sessions, {"t.1.1": 1, "another": 1})
    await hasty.sweep()
    await client.zadd(sessions.keys.sessions, {"t.0.1": 1})
    await sessions.due()
    await sessions.record("another", b"call", "one")
    await sessions.finish("session:own", ["own"], [1])
    await sessions.finish("session:own", ["own"], [2])
    await sessions.finish("task:t", ["t.0.1", "t.1.1", "calls"], [1])
    assert (await tasks.stat()).conservation_error == 0


async def keep_the_fleet(client: RedisClient) -> None:
    """Servers, heartbeats, phases, notices and orders."""
    fleet, queue = Fleet(client, "test"), make_queue(client)
    term = await queue.take_term(0)
    for _ in range(2):
        await fleet.join(ServerRecord("r0", "127.0.0.1:1", "torch", policy_version=1))
    await fleet.report(ServerRecord("r0", "127.0.0.1:1", "torch", policy_version=2))
    await fleet.join(ServerRecord("r1", "127.0.0.1:1", "torch"))
    await fleet.set_states(["r0", "gone"], "READY", term)
    with pytest.raises(PenstockError):
        await fleet.set_state("r0", "READY", term - 1)
    await fleet.leave("r1")
    await asyncio.sleep(0.01)
    await fleet.forget_silent(0.001, term)
    for _ in range(2):
        await Heartbeats(client, "test").beat("learner")
        await Heartbeats(client, "test").count_start("learner")
        await RunControl(client, "test").hold(1)
        for event in (Event("reward_failed", "place", "text"), Event("reward_failed", "other", "text")):
            await Notices(client, "test").record(event)
    for phase, is_first in (("starting", True), ("loading", False), ("loading", False)):
        await Phases(client, "test").enter("learner", phase, is_first=is_first)


STORIES = (
    train, drop, lose_the_tail, wait_for_the_oldest, append_returned, change_the_order, undo, fail_prompts, evaluate,
    serve_sessions, keep_the_fleet,
)  # fmt: skip


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptFaults]:
    """What came of all scripts under all faults."""
    server = RedisProcess(tmp_path_factory.mktemp("redis"))
    server.start("--appendonly", "no")  # every fault starts from a restored state
    plain = redis.Redis.from_url(server.url)
    checked = ScriptFaults(plain)

    async def tell_all() -> None:
        client = connect(RedisConfig(url=server.url))
        for story in STORIES:
            await client.flushdb()
            await story(client)
        await client.aclose()

    with pytest.MonkeyPatch.context() as monkeypatch:
        checked.watch(monkeypatch)
        asyncio.run(tell_all())
    plain.close()
    server.kill()
    yield checked


def test_every_script_is_checked_and_has_written(faults: ScriptFaults) -> None:
    assert not faults.unchecked, "call it in one of the stories"
    writes = {command for commands in WRITES.values() for command in commands.split()}
    for folder, name in script_names() - set(faults.writing):
        commands = set(re.findall(r"'([A-Z]+)'", folder.load(name).text))
        assert not commands & writes, f"{name} has written nothing in the stories"


def test_scripts_are_in_the_folders_that_are_checked() -> None:
    files = [path for package in PRODUCT for path in (ROOT / package).rglob("*") if path.suffix in (".lua", ".py")]
    names = {(path.parent.name, path.stem) for path in files if path.suffix == ".lua" and "prelude" not in path.stem}
    assert names == {("lua", name) for _, name in script_names()}
    assert [path for path in files if path.suffix == ".py" and "redis.call(" in path.read_text()] == []


def test_no_script_is_half_done(faults: ScriptFaults) -> None:
    assert not faults.problems, "\n" + "\n".join(faults.problems)


REASON, TYPE, COUNTER = (
    "numbers(EXPIRED_REASONS, label_of(ARGV[3]))\n", "check('HLEN', MANIFESTS)\n", "numbers(COUNTERS, 'redelivered')\n",
)  # fmt: skip
UNREAD, UNCHECKED, LATE = (
    "was not read before the first write", "was not checked before the first write",
    "first reached after the first write",
)  # fmt: skip


@pytest.mark.parametrize(
    ("removed", "added", "found"),
    [
        ("", "", [""]), (REASON, "", [UNREAD]), (REASON, REASON, [UNREAD, LATE]), (TYPE, "", [UNCHECKED]),
        (TYPE, TYPE, [UNCHECKED]), ("", COUNTER, [LATE]),
    ],
)  # fmt: skip
async def test_a_script_that_checks_too_late_is_found(
    redis_process: RedisProcess, queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch,
    removed: str, added: str, found: list[str],
) -> None:  # fmt: skip
    """A check of discard.lua is removed, or comes after the first write. The last is of another field of a hash."""
    await queue.take_term(0)
    await queue.submit([PROMPT] * 2, [0] * 2, "")
    await queue.append_many([FinishedGroup(lease, b"group", 0) for lease in await queue.lease("s", 2)])
    await queue.take(1, 1)
    await queue.client.hset(queue.keys.expired_reasons, "no_spread", 1)
    load, end = ScriptFolder.load, "count('expired', 1)\n"

    def load_late(folder: ScriptFolder, name: str) -> Script:
        text = load(folder, name).text
        assert removed in text and text.count(end) == 1
        return Script(text.replace(removed, "").replace(end, added + end), "")

    monkeypatch.setattr(ScriptFolder, "load", load_late)
    with redis.Redis.from_url(redis_process.url) as plain:
        faults = ScriptFaults(plain)
        for prompt_id in (1, 2):
            faults.check(QUEUE, "discard", queue.keys.prefix, (queue.term, prompt_id, "no_spread"))
    problems = "\n".join(faults.problems)
    assert all(text in problems for text in found) and bool(problems) == any(found), problems


def kill_script(client: redis.Redis) -> str:
    """Send SCRIPT KILL until a script runs. Returns the answer."""
    while True:
        try:
            client.script_kill()
        except ResponseError as error:
            if "NOTBUSY" not in str(error):
                return str(error)
        else:
            return "killed"


def wait_until_loaded(client: redis.Redis) -> None:
    """Wait until Redis has read its append-only file."""
    while True:
        try:
            client.ping()
        except BusyLoadingError:
            time.sleep(0.01)
        else:
            return


def test_a_redis_that_is_killed_inside_a_script_forgets_the_script(faults: ScriptFaults, tmp_path: Path) -> None:
    """Before its first write a script that does not end can be killed. After it only Redis can: it writes a script to
    its append-only file when the script has ended, so that the next Redis knows all of it or nothing."""
    server = RedisProcess(tmp_path)
    # With `everysec`, Redis may answer before a write is in the file, and a kill may lose it.
    server.config.write_text(server.config.read_text() + "lua-time-limit 1\nappendfsync always\n")
    server.start()

    def hang(case: Case, at: int) -> str:
        runner = redis.Redis.from_url(server.url, retry=None)
        try:
            runner.eval(*case.words(hang_at=at))
        except RedisError as error:
            return str(error)
        finally:
            runner.close()
        raise AssertionError("the script has ended")

    client = redis.Redis.from_url(server.url)
    store = ScriptFaults(client)
    try:
        with ThreadPoolExecutor(1) as threads:
            for case in faults.writing.values():
                store.restore(case.dump)
                hanging = threads.submit(hang, case, 1)
                assert kill_script(client) == "killed"
                assert "killed" in hanging.result(timeout=60)
                assert store.read_state() == case.state, case.name
                hanging = threads.submit(hang, case, case.num_calls + 1)
                assert "UNKILLABLE" in kill_script(client), case.name
                server.kill()
                hanging.result(timeout=60)
                server.start()
                wait_until_loaded(client)
                assert store.read_state() == case.state, case.name
    finally:
        client.close()
        server.kill()


async def test_scripts_take_more_values_than_lua_passes_to_a_function(queue: RedisReplayQueue) -> None:
    """Lua's `unpack` fails beyond about 8,000 values. A script that fails so has perhaps written before."""
    num_prompts = 9_000
    queue = make_queue(queue.client, groups_per_step=num_prompts)
    await queue.take_term(0)
    ids = list((await queue.submit([PROMPT] * num_prompts, [1] * num_prompts, "key")).prompt_ids)
    leases = await queue.lease("s", num_prompts)
    assert await queue.heartbeat("s", leases) == []
    assert await queue.save_tokens("s", [(lease, SavedTokens(0, 0, b"t")) for lease in leases]) == []
    assert await queue.append_many([FinishedGroup(lease, b"g", 0) for lease in leases]) == ["accepted"] * num_prompts
    assert set((await queue.reconcile(leases)).done) == set()
    assert await queue.take(1, num_prompts) == ids
    assert await queue.commit(1, ids) == num_prompts
    await queue.rewind("/checkpoints/0", 0, ids)
    await PromptBook(queue.client, "test").cancel(ids)
    stat = await queue.stat()
    assert (stat.conservation_error, stat.pending_prompts, stat.trained) == (0, 0, 0)


async def test_a_key_of_tasks_that_were_refused_stands_for_nothing(queue: RedisReplayQueue) -> None:
    tasks = TaskStore(queue.client, "test", 60, SessionLimits(max_task_places=1))
    wanted = [tasks_pb2.NewTask(task_id="t", payload_json="1", num_sessions=2)]
    before = await queue.client.keys("*")
    with pytest.raises(QueueFull):
        await tasks.submit(wanted, "key")
    assert await queue.client.keys("*") == before
    more = TaskStore(queue.client, "test", 60, SessionLimits())
    assert [await more.submit(wanted, "key") for _ in range(2)] == [(["t"], False), (["t"], True)]
