"""Tests of the replay queue on Redis only: its keys, its payloads, and the cost of a call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import redis

from penstock.errors import Fenced, Unavailable
from penstock.replay import group_payloads
from penstock.replay.group_payloads import GroupPayloads
from penstock.replay.inspection import QueueInspector
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import FinishedGroup
from penstock.store.redis_client import QUEUE, ScriptFolder
from support.redis_server import num_commands


async def commands_of(queue: RedisReplayQueue, count: int) -> list[int]:
    """The number of Redis commands that a lease, a take, a commit and a stat cost with `count` ready groups."""
    await queue.client.flushdb()
    await queue.take_term(0)
    await queue.submit([b"p"] * (count + 8), [0] * (count + 8), "")
    for lease in await queue.lease("s", count):
        await queue.append(lease, b"g", 0)
    costs = []
    await queue.client.config_resetstat()
    for call in (lambda: queue.lease("s", 4), lambda: queue.take(1, 4), lambda: queue.commit(0, []), queue.stat):
        before = await num_commands(queue.client)
        await call()
        costs.append(await num_commands(queue.client) - before)
    return costs


async def test_a_call_costs_the_same_number_of_commands_in_a_long_queue(queue: RedisReplayQueue) -> None:
    queue.config = queue.config.model_copy(update={"max_staleness": 10_000, "stale_policy": "wait"})
    await commands_of(queue, 10)  # loads the scripts
    assert await commands_of(queue, 50) == await commands_of(queue, 2000)


async def test_the_sets_of_a_batch_are_not_searched_from_end_to_end(queue: RedisReplayQueue) -> None:
    """Redis keeps small sorted sets and hashes as lists, unless its settings say otherwise."""
    queue.config = queue.config.model_copy(update={"max_staleness": 100})
    await queue.submit([b"p"] * 20, [0] * 20, "")
    await queue.append_many([FinishedGroup(lease, b"g", 0) for lease in await queue.lease("s", 20)])
    encodings = [await queue.client.object("encoding", key) for key in (queue.keys.ready, queue.keys.meta)]
    assert encodings == [b"skiplist", b"hashtable"]


async def test_dead_letter_keeps_the_bytes(queue: RedisReplayQueue) -> None:
    [prompt_id] = (await queue.submit([b"prompt"], [0], "")).prompt_ids
    [lease] = await queue.lease("s", 1)
    await queue.append(lease, b"group", 0)
    await queue.take_term(0)
    await queue.dead_letter(prompt_id, "corrupt: bad magic")
    [(_, fields)] = await queue.client.xrange(f"{queue.keys.prefix}dead")
    assert (fields[b"group"], fields[b"prompt"]) == (b"group", b"prompt")


@pytest.mark.parametrize("end", ["commit", "expire", "discard", "dead_letter"])
async def test_no_end_leaves_keys_of_the_group_behind(queue: RedisReplayQueue, end: str) -> None:
    await queue.submit([b"p"], [0], "")
    [lease] = await queue.lease("s", 1)
    await queue.append(lease, b"group", 0)
    await queue.take_term(0)
    [prompt_id] = await queue.take(1, 1)
    if end == "commit":
        await queue.commit(1, [prompt_id])
    elif end == "expire":
        await queue.expire(prompt_id)
    else:
        await getattr(queue, end)(prompt_id, "reason")
    if end != "expire":
        assert await queue.append(lease, b"late", 0) in ("duplicate", "unknown")
    kept = {key.decode().removeprefix(queue.keys.prefix) for key in await queue.client.keys(f"{queue.keys.prefix}*")}
    assert not {name for name in kept if name.startswith("group:")}
    assert not kept & {"open", "leases", "owners", "returned", "ready", "ready_by_version", "delivered", "meta"}


async def taken(queue: RedisReplayQueue, payloads: list[bytes]) -> list[int]:
    """The ids of groups that a new learner has just taken."""
    queue.config = queue.config.model_copy(update={"max_staleness": 100})
    await queue.take_term(0)
    await queue.submit([b"p"] * len(payloads), [0] * len(payloads), "")
    for lease, payload in zip(await queue.lease("s", len(payloads)), payloads, strict=True):
        await queue.append(lease, payload, 0)
    return await queue.take(1, len(payloads))


async def mgets(queue: RedisReplayQueue) -> int:
    return int((await queue.client.info("commandstats")).get("cmdstat_mget", {"calls": 0})["calls"])


async def test_small_groups_come_with_the_take_and_large_ones_when_they_are_fetched(
    queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_payloads, "FETCHED_AHEAD_BYTES", 20)
    for payloads, fetched_later in (([b"0123456789", b"9876543210"], 0), ([b"0123456789", b"98765432100"], 1)):
        await queue.client.flushdb()
        prompt_ids = await taken(queue, payloads)
        before = await mgets(queue)
        assert [delivery.payload for delivery in await queue.fetch(prompt_ids)] == payloads
        assert await mgets(queue) - before == fetched_later
        assert [delivery.payload for delivery in await queue.fetch(prompt_ids)] == payloads, "they are still queued"


@pytest.mark.parametrize("end", ["commit", "expire", "discard", "dead_letter"])
async def test_a_group_that_ended_after_its_take_is_not_fetched(queue: RedisReplayQueue, end: str) -> None:
    first, second = await taken(queue, [b"a", b"b"])
    if end == "commit":
        await queue.commit(0, [first])
    else:
        await getattr(queue, end)(first, "reason")
    assert [delivery.prompt_id for delivery in await queue.fetch([first, second])] == [second]


async def test_a_take_whose_payloads_could_not_be_fetched_is_answered_again(
    queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups are in the step's manifest, and no other take of this learner knows them."""

    def breaks(*_: object) -> dict[int, bytes]:
        raise redis.ConnectionError("the connection was lost")

    with monkeypatch.context() as patched:
        patched.setattr(GroupPayloads, "_fetched", breaks)
        with pytest.raises(Unavailable):
            await taken(queue, [b"a", b"b"])
    prompt_ids = await queue.take(1, 1)
    assert len(prompt_ids) == 2
    assert [delivery.payload for delivery in await queue.fetch(prompt_ids)] == [b"a", b"b"]
    assert await queue.take(1, 2) == []


async def test_the_order_of_take_may_change_while_groups_are_queued(queue: RedisReplayQueue) -> None:
    """Groups that were appended while they were taken by admission have no entry in `ready_by_version` yet."""
    fifo = queue.config.model_copy(update={"max_staleness": 100, "stale_policy": "correct", "selection": "fifo"})
    queue.config = fifo
    ids = list((await queue.submit([b"p"] * 8, [0] * 8, "")).prompt_ids)
    leases = await queue.lease("s", 8)
    await queue.append_many([FinishedGroup(lease, b"g", min_version=4 - i) for i, lease in enumerate(leases[:4])])
    await queue.take_term(0)
    assert await queue.client.exists(queue.keys.ready_by_version) == 0
    queue.config = fifo.model_copy(update={"selection": "freshest"})
    assert await QueueInspector(queue.client, "test").queued_ids("freshest", 10) == ids[:4]
    await queue.append_many([FinishedGroup(lease, b"g", min_version=5 + i) for i, lease in enumerate(leases[4:])])
    assert await queue.take(1, 3) == [ids[7], ids[6], ids[5]]
    queue.config = fifo
    assert await queue.take(2, 2) == ids[:2]
    queue.config = fifo.model_copy(update={"selection": "freshest"})
    assert await queue.take(3, 9) == [ids[4], ids[2], ids[3]]
    assert await queue.client.exists(queue.keys.ready, queue.keys.ready_by_version) == 0
    assert (await queue.stat()).conservation_error == 0


async def test_servers_that_wait_for_room_are_not_woken_for_nothing(queue: RedisReplayQueue) -> None:
    """With a thousand waiting servers, each signal costs a thousand leases."""

    async def newest() -> list[bytes]:
        return [entry_id for entry_id, _ in await queue.client.xrevrange(queue.keys.lease_signals)]

    await queue.take_term(0)
    await queue.submit([b"p"] * 6, [0] * 6, "")
    leases = await queue.lease("s", 6)
    assert len(leases) == 4, "two are left, and there is no room for them"
    before = await newest()
    await queue.submit([b"p"], [0], "")
    await queue.append_many([FinishedGroup(lease, b"g", 0) for lease in leases])
    await queue.take(1, 2)
    assert await newest() == before
    await queue.publish(1, 1, b"")
    assert await newest() != before


async def test_a_commit_takes_its_groups_out_of_later_manifests(queue: RedisReplayQueue) -> None:
    """A learner may commit a group for an earlier step than it was taken for, when its checkpoint covers it."""
    ids = list((await queue.submit([b"p"] * 4, [0] * 4, "")).prompt_ids)
    await queue.append_many([FinishedGroup(lease, b"g", 0) for lease in await queue.lease("s", 4)])
    await queue.take_term(0)
    assert (await queue.take(1, 2), await queue.take(2, 2)) == (ids[:2], ids[2:])
    assert await queue.commit(1, [ids[0], ids[2]]) == 2
    stat = await queue.stat()
    assert (stat.trained, stat.queued, stat.delivered, stat.conservation_error) == (2, 2, 1, 0)
    assert await queue.rewind_step(1, 2) == {2: [ids[3]]}


async def test_a_redis_that_forgot_its_scripts_keeps_no_payload_without_a_group(queue: RedisReplayQueue) -> None:
    await queue.submit([b"p"] * 2, [0, 0], "")
    first, second = await queue.lease("s", 2)
    await queue.append(first, b"group", 0)
    await queue.client.script_flush()
    assert await queue.append(second, b"group", 0) == "accepted"
    await queue.take_term(0)
    taken = await queue.take(1, 2)
    await queue.client.script_flush()
    assert len(await queue.fetch(taken)) == await queue.commit(1, taken) == 2
    assert await queue.client.keys(f"{queue.keys.prefix}group:*") == []


async def test_append_names_its_script_which_redis_has(queue: RedisReplayQueue) -> None:
    """Its text is longer than a small group, and is read by Redis whenever it is sent."""
    await queue.submit([b"p"] * 2, [0, 0], "")
    first, second = await queue.lease("s", 2)
    await queue.append(first, b"group", 0)
    await queue.client.config_resetstat()
    await queue.append(second, b"group", 0)
    calls = await queue.client.info("commandstats")
    assert "cmdstat_evalsha" in calls and "cmdstat_eval" not in calls


async def test_scripts_forgotten_in_the_middle_of_a_batch_lose_no_group(
    queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transactions name the script by its digest, here by one that Redis does not know."""
    load = ScriptFolder.load
    await queue.submit([b"p"] * 3, [0] * 3, "")
    groups = [FinishedGroup(lease, b"group", 0) for lease in await queue.lease("s", 3)]
    assert await queue.append_many(groups[:1]) == ["accepted"]
    monkeypatch.setattr(group_payloads, "APPENDED_BYTES", 1)
    script = replace(QUEUE.load("append"), sha="0" * 40)
    monkeypatch.setattr(ScriptFolder, "load", lambda self, name: script if name == "append" else load(self, name))
    assert await queue.append_many(groups) == ["duplicate", "accepted", "accepted"]
    assert (await queue.stat()).queued == len(await queue.client.keys(f"{queue.keys.prefix}group:*")) == 3


async def test_a_large_batch_passes_in_one_call(queue: RedisReplayQueue) -> None:
    """The batch has more values than Lua can pass to a function at once."""
    queue.config = queue.config.model_copy(update={"max_staleness": 10_000})
    ids = list((await queue.submit([b"p"] * 5000, [0] * 5000, "")).prompt_ids)
    leases = await queue.lease("s", 5000)
    assert set(await queue.append_many([FinishedGroup(lease, b"g", 0) for lease in leases])) == {"accepted"}
    await queue.take_term(0)
    assert await queue.take(1, 5000) == ids
    assert len(await queue.fetch(ids)) == 5000
    assert await queue.commit(1, ids) == 5000
    for prompt_id in (ids[0], ids[2500], ids[-1]):
        assert (await queue.get_prompt(prompt_id)).state == "trained"
    stat = await queue.stat()
    assert (stat.trained, stat.queued, stat.queued_bytes, stat.conservation_error) == (5000, 0, 0, 0)


async def test_a_store_that_lost_its_data_is_not_taken_for_another_learner(queue: RedisReplayQueue) -> None:
    await queue.take_term(2)
    await queue.client.flushdb()
    with pytest.raises(Fenced, match="Redis has lost data: it knows terms up to 0, and this learner has term 3"):
        await queue.commit(1, [])
