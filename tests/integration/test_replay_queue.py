"""The replay queue on a real Redis: every transition of the diagram in penstock/replay/contract.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from penstock.errors import Fenced, NotFound
from penstock.replay.contract import Lease
from penstock.replay.redis_queue import RedisReplayQueue


async def submit(queue: RedisReplayQueue, count: int, key: str = "") -> list[int]:
    payloads = [f"prompt {i}".encode() for i in range(count)]
    return list((await queue.submit(payloads, [0] * count, key)).prompt_ids)


async def finish(queue: RedisReplayQueue, leases: list[Lease], version: int = 0) -> None:
    for lease in leases:
        assert await queue.append(lease, b"group of %d" % lease.prompt_id, version) == "accepted"


async def assert_conserved(queue: RedisReplayQueue) -> None:
    stat = await queue.stat()
    assert stat.conservation_error == 0, stat


async def test_submission_with_the_same_key_is_accepted_once(queue: RedisReplayQueue) -> None:
    first = await queue.submit([b"a", b"b"], [0, 0], "key")
    again = await queue.submit([b"a", b"b"], [0, 0], "key")
    assert again.prompt_ids == first.prompt_ids
    assert (first.replayed, again.replayed) == (False, True)
    assert (await queue.stat()).pending == 2


async def test_higher_priority_is_leased_first(queue: RedisReplayQueue) -> None:
    await queue.submit([b"low", b"high", b"low too"], [0, 5, 0], "")
    leases = await queue.lease("s", 3)
    assert [lease.payload for lease in leases] == [b"high", b"low", b"low too"]


async def test_admission_holds_the_staleness_bound(queue: RedisReplayQueue) -> None:
    """(max_staleness 1 + step 0 + 1) · 2 groups = 4, until a step is published."""
    await submit(queue, 20)
    assert len(await queue.lease("s", 10)) == 4
    assert await queue.lease("s", 10) == []
    await queue.take_term(0)
    await queue.publish(1, 1, b"policy")
    assert len(await queue.lease("s", 10)) == 2
    await assert_conserved(queue)


async def test_staleness_zero_is_synchronous(queue: RedisReplayQueue) -> None:
    queue.config = queue.config.model_copy(update={"max_staleness": 0})
    await submit(queue, 10)
    await queue.take_term(0)
    leases = await queue.lease("s", 10)
    assert len(leases) == 2
    await finish(queue, leases)
    await queue.take(1, 2)
    assert await queue.lease("s", 10) == []
    await queue.publish(1, 1, b"")
    assert len(await queue.lease("s", 10)) == 2


async def test_a_group_is_trained_once_from_lease_to_commit(queue: RedisReplayQueue) -> None:
    ids = await submit(queue, 2)
    leases = await queue.lease("s", 2)
    await finish(queue, leases)
    await queue.take_term(0)
    assert await queue.take(1, 2) == ids
    assert [d.payload for d in await queue.fetch(ids)] == [b"group of %d" % i for i in ids]
    assert (await queue.get_prompt(ids[0])).state == "queued"
    assert await queue.commit(1, ids) == 2
    assert await queue.commit(1, ids) == 0
    assert (await queue.get_prompt(ids[0])).state == "trained"
    stat = await queue.stat()
    assert (stat.trained, stat.queued, stat.queued_bytes, stat.in_flight) == (2, 0, 0, 0)
    await assert_conserved(queue)


async def test_second_append_is_a_duplicate_and_leaves_the_first_group_as_it_was(queue: RedisReplayQueue) -> None:
    await submit(queue, 1)
    [lease] = await queue.lease("s", 1)
    await finish(queue, [lease])
    assert await queue.append(lease, b"group of %d" % lease.prompt_id, 0) == "duplicate"
    assert await queue.append(replace(lease, attempt=2), b"another", 0) == "duplicate"
    [delivery] = await queue.fetch([lease.prompt_id])
    assert delivery.payload == b"group of %d" % lease.prompt_id
    await assert_conserved(queue)


async def test_append_after_commit_is_a_duplicate(queue: RedisReplayQueue) -> None:
    await submit(queue, 1)
    [lease] = await queue.lease("s", 1)
    await finish(queue, [lease])
    await queue.take_term(0)
    await queue.commit(1, await queue.take(1, 1))
    assert await queue.append(lease, b"late", 0) == "duplicate"
    assert await queue.client.exists(f"{queue.prefix}group:{lease.prompt_id}:{lease.attempt}") == 0


async def test_an_expired_lease_goes_to_another_server(queue: RedisReplayQueue) -> None:
    queue.config = queue.config.model_copy(update={"lease_ttl_s": 0.05})
    await submit(queue, 1)
    [first] = await queue.lease("dies", 1)
    second = await lease_again(queue, "lives")
    assert (second.prompt_id, second.attempt) == (first.prompt_id, 2)
    assert await queue.heartbeat("dies", [first]) == [first.prompt_id]
    assert await queue.heartbeat("lives", [second]) == []
    stat = await queue.stat()
    assert (stat.admitted, stat.in_flight, stat.reclaimed) == (1, 1, 1)
    await assert_conserved(queue)


async def test_the_first_server_to_finish_wins(queue: RedisReplayQueue) -> None:
    queue.config = queue.config.model_copy(update={"lease_ttl_s": 0.05})
    await submit(queue, 1)
    [slow] = await queue.lease("slow", 1)
    fast = await lease_again(queue, "fast")
    assert await queue.append(slow, b"slow but first", 0) == "accepted"
    assert await queue.append(fast, b"second", 0) == "duplicate"
    await assert_conserved(queue)


async def test_a_prompt_that_keeps_failing_is_dead_lettered(queue: RedisReplayQueue) -> None:
    [prompt_id] = await submit(queue, 1)
    for _ in range(3):
        [lease] = await queue.lease("s", 1)
        await queue.give_back("s", lease, failure="engine_error")
    assert await queue.lease("s", 1) == []
    assert (await queue.stat()).dead_lettered == 1
    assert await queue.dead_letter_reasons() == {"engine_error": 1}
    with pytest.raises(NotFound):
        await queue.get_prompt(prompt_id)
    await assert_conserved(queue)


async def test_giving_back_without_a_failure_costs_no_attempt(queue: RedisReplayQueue) -> None:
    await submit(queue, 1)
    for attempt in range(1, 8):
        [lease] = await queue.lease("s", 1)
        assert lease.attempt == attempt
        await queue.give_back("s", lease)
    await assert_conserved(queue)


async def test_an_older_term_is_fenced_from_every_learner_call(queue: RedisReplayQueue) -> None:
    zombie = RedisReplayQueue(queue.client, "test", queue.config)
    await zombie.take_term(0)
    await submit(queue, 1)
    await finish(queue, await queue.lease("s", 1))
    await queue.take_term(0)
    for call in (
        zombie.take(1, 1), zombie.commit(1, [1]), zombie.expire(1), zombie.dead_letter(1, "x"),
        zombie.publish(1, 1, b""), zombie.allocate_version(0), zombie.restore(0),
    ):  # fmt: skip
        with pytest.raises(Fenced):
            await call
    assert await queue.take(1, 1) == [1]


async def test_a_new_learner_gets_the_same_batches_again(queue: RedisReplayQueue) -> None:
    ids = await submit(queue, 4)
    await finish(queue, await queue.lease("s", 4))
    await queue.take_term(0)
    assert await queue.take(1, 1) + await queue.take(1, 1) == ids[:2]
    assert await queue.take(2, 2) == ids[2:]
    await queue.commit(1, ids[:2])

    successor = RedisReplayQueue(queue.client, "test", queue.config)
    assert await successor.take_term(0) == queue.term + 1
    assert await successor.restore(1) == {2: ids[2:]}
    assert (await successor.stat()).redelivered == 2
    assert await successor.commit(2, ids[2:]) == 2
    await assert_conserved(queue)


async def test_expiry_admits_the_prompt_again_and_tells_the_outbox(queue: RedisReplayQueue) -> None:
    [prompt_id] = await submit(queue, 1)
    [lease] = await queue.lease("s", 1)
    await finish(queue, [lease])
    await queue.take_term(0)
    await queue.take(1, 1)
    await queue.expire(prompt_id)
    assert (await queue.reconcile([lease])).settled == (prompt_id,)
    stat = await queue.stat()
    assert (stat.expired, stat.pending, stat.admitted) == (1, 1, 1)
    [again] = await queue.lease("s", 1)
    assert again.prompt_id == prompt_id and again.attempt > lease.attempt
    assert (await queue.stat()).admitted == 2
    await assert_conserved(queue)


async def test_dead_letter_keeps_the_bytes(queue: RedisReplayQueue) -> None:
    [prompt_id] = await submit(queue, 1)
    await finish(queue, await queue.lease("s", 1))
    await queue.take_term(0)
    await queue.take(1, 1)
    await queue.dead_letter(prompt_id, "corrupt: bad magic")
    [(_, fields)] = await queue.client.xrange(f"{queue.prefix}dead")
    assert fields[b"group"] == b"group of %d" % prompt_id
    assert fields[b"prompt"] == b"prompt 0"
    await assert_conserved(queue)


async def test_a_full_queue_refuses_and_accepts_again_after_a_take(queue: RedisReplayQueue) -> None:
    queue.config = queue.config.model_copy(update={"capacity_bytes": 2**20})
    await submit(queue, 3)
    leases = await queue.lease("s", 3)
    big = b"x" * 700_000
    assert await queue.append(leases[0], big, 0) == "accepted"
    assert await queue.append(leases[1], big, 0) == "full"
    await queue.take_term(0)
    await queue.take(1, 1)
    assert await queue.append(leases[1], big, 0) == "accepted"
    await assert_conserved(queue)


async def test_reconcile_names_groups_that_redis_lost(queue: RedisReplayQueue) -> None:
    await submit(queue, 2)
    lost, kept = await queue.lease("s", 2)
    await finish(queue, [kept])
    outbox = await queue.reconcile([lost, kept])
    assert (outbox.settled, outbox.missing) == ((), (lost.prompt_id,))


async def test_freshest_first_takes_the_newest_version(queue: RedisReplayQueue) -> None:
    queue.config = queue.config.model_copy(update={"selection": "freshest"})
    await submit(queue, 3)
    for version, lease in zip([4, 9, 2], await queue.lease("s", 3), strict=True):
        await finish(queue, [lease], version)
    await queue.take_term(0)
    assert await queue.take(1, 1) + await queue.take(1, 2) == [2, 1, 3]


async def test_versions_are_never_reused(queue: RedisReplayQueue) -> None:
    await queue.take_term(0)
    assert [await queue.allocate_version(0), await queue.allocate_version(0)] == [1, 2]
    await queue.take_term(0)
    assert await queue.allocate_version(1) == 3
    assert await queue.allocate_version(10) == 10


async def test_evaluations_are_scored_and_never_queued(queue: RedisReplayQueue) -> None:
    await queue.create_evaluation("heldout", [b"q1", b"q2"])
    assert (await queue.create_evaluation("heldout", [b"other"])).num_prompts == 2
    first, second = await queue.lease("s", 5)
    await queue.record_evaluation("heldout", first, [1.0, 0.0], 3, 4)
    await queue.record_evaluation("heldout", first, [1.0, 1.0], 3, 4)
    await queue.give_back("s", second)
    [second] = await queue.lease("s", 5)
    await queue.record_evaluation("heldout", second, [1.0, 1.0], 4, 5)
    evaluation = await queue.get_evaluation("heldout")
    assert (evaluation.num_finished, evaluation.score) == (2, 0.75)
    assert (evaluation.policy_version_min, evaluation.policy_version_max) == (3, 5)
    stat = await queue.stat()
    assert (stat.admitted, stat.in_flight) == (0, 0)


async def lease_again(queue: RedisReplayQueue, server_id: str) -> Lease:
    """Lease the one prompt as soon as its first lease has run out."""
    async with asyncio.timeout(20):
        while True:
            leases = await queue.lease(server_id, 1)
            if leases:
                return leases[0]
            await asyncio.sleep(0.01)
