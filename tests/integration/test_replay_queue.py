"""The conformance suite of replay backends: every transition of the diagram in penstock/replay/contract.py.

A backend is whatever makes queue objects over one shared store; add it to `BACKENDS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio as redis

from penstock.config.service import ReplayConfig
from penstock.errors import Fenced, NotFound
from penstock.replay.contract import FeedPosition, FinishedGroup, Lease
from penstock.replay.memory_queue import MemoryReplayQueue
from penstock.replay.memory_store import MemoryStore
from penstock.replay.redis_queue import RedisReplayQueue

BACKENDS = ("redis", "memory")
ReplayQueue = RedisReplayQueue | MemoryReplayQueue
MakeQueue = Callable[..., ReplayQueue]


@pytest.fixture(params=BACKENDS)
def make_queue(request: pytest.FixtureRequest) -> MakeQueue:
    """Makes queue objects that share a store: 2 groups a step, staleness 1, three attempts, unless told otherwise."""
    store = MemoryStore() if request.param == "memory" else None
    client: redis.Redis | None = request.getfixturevalue("redis_client") if request.param == "redis" else None

    def make(**overrides: Any) -> ReplayQueue:
        fields = {"groups_per_step": 2, "max_staleness": 1, "max_attempts": 3, "lease_ttl_s": 30} | overrides
        if store is not None:
            return MemoryReplayQueue(store, ReplayConfig(**fields))
        assert client is not None
        return RedisReplayQueue(client, "test", ReplayConfig(**fields))

    return make


@pytest.fixture
def queue(make_queue: MakeQueue) -> ReplayQueue:
    return make_queue()


async def submit(queue: ReplayQueue, count: int, key: str = "") -> list[int]:
    payloads = [f"prompt {i}".encode() for i in range(count)]
    return list((await queue.submit(payloads, [0] * count, key)).prompt_ids)


async def finish(queue: ReplayQueue, leases: list[Lease], version: int = 0) -> None:
    for lease in leases:
        assert await queue.append(lease, b"group of %d" % lease.prompt_id, version) == "accepted"


async def assert_conserved(queue: ReplayQueue) -> None:
    stat = await queue.stat()
    assert stat.conservation_error == 0, stat


async def test_submission_with_the_same_key_is_accepted_once(queue: ReplayQueue) -> None:
    first = await queue.submit([b"a", b"b"], [0, 0], "key")
    again = await queue.submit([b"a", b"b"], [0, 0], "key")
    assert again.prompt_ids == first.prompt_ids
    assert (first.replayed, again.replayed) == (False, True)
    assert (await queue.stat()).pending == 2


async def test_higher_priority_is_leased_first(queue: ReplayQueue) -> None:
    await queue.submit([b"low", b"high", b"low too"], [0, 5, 0], "")
    leases = await queue.lease("s", 3)
    assert [lease.payload for lease in leases] == [b"high", b"low", b"low too"]


async def test_admission_holds_the_staleness_bound(queue: ReplayQueue) -> None:
    """(max_staleness 1 + step 0 + 1) · 2 groups = 4, until a step is published."""
    await submit(queue, 20)
    assert len(await queue.lease("s", 10)) == 4
    assert await queue.lease("s", 10) == []
    await queue.take_term(0)
    await queue.publish(1, 1, b"policy")
    assert len(await queue.lease("s", 10)) == 2
    await assert_conserved(queue)


async def test_staleness_zero_is_synchronous(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0)
    await submit(queue, 10)
    await queue.take_term(0)
    leases = await queue.lease("s", 10)
    assert len(leases) == 2
    await finish(queue, leases)
    await queue.take(1, 2)
    assert await queue.lease("s", 10) == []
    await queue.publish(1, 1, b"")
    assert len(await queue.lease("s", 10)) == 2


async def test_a_group_is_trained_once_from_lease_to_commit(queue: ReplayQueue) -> None:
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


async def test_second_append_is_a_duplicate_and_leaves_the_first_group_as_it_was(queue: ReplayQueue) -> None:
    await submit(queue, 1)
    [lease] = await queue.lease("s", 1)
    await finish(queue, [lease])
    assert await queue.append(lease, b"group of %d" % lease.prompt_id, 0) == "duplicate"
    assert await queue.append(replace(lease, attempt=2), b"another", 0) == "duplicate"
    [delivery] = await queue.fetch([lease.prompt_id])
    assert delivery.payload == b"group of %d" % lease.prompt_id
    await assert_conserved(queue)


async def test_append_after_commit_is_a_duplicate(queue: ReplayQueue) -> None:
    await submit(queue, 1)
    [lease] = await queue.lease("s", 1)
    await finish(queue, [lease])
    await queue.take_term(0)
    await queue.commit(1, await queue.take(1, 1))
    assert await queue.append(lease, b"late", 0) == "duplicate"
    assert await queue.fetch([lease.prompt_id]) == []


async def test_an_expired_lease_goes_to_another_server(make_queue: MakeQueue) -> None:
    queue = make_queue(lease_ttl_s=0.05)
    await submit(queue, 1)
    [first] = await queue.lease("dies", 1)
    second = await lease_again(queue, "lives")
    assert (second.prompt_id, second.attempt) == (first.prompt_id, 2)
    assert await queue.heartbeat("dies", [first]) == [first.prompt_id]
    assert await queue.heartbeat("lives", [second]) == []
    stat = await queue.stat()
    assert (stat.admitted, stat.in_flight, stat.reclaimed) == (1, 1, 1)
    await assert_conserved(queue)


async def test_the_first_server_to_finish_wins(make_queue: MakeQueue) -> None:
    queue = make_queue(lease_ttl_s=0.05)
    await submit(queue, 1)
    [slow] = await queue.lease("slow", 1)
    fast = await lease_again(queue, "fast")
    assert await queue.append(slow, b"slow but first", 0) == "accepted"
    assert await queue.append(fast, b"second", 0) == "duplicate"
    await assert_conserved(queue)


async def test_a_prompt_that_keeps_failing_is_dead_lettered(queue: ReplayQueue) -> None:
    [prompt_id] = await submit(queue, 1)
    for _ in range(3):
        [lease] = await queue.lease("s", 1)
        await queue.give_back("s", lease, failure="engine_error")
    assert await queue.lease("s", 1) == []
    assert (await queue.stat()).dead_lettered == 1
    assert await queue.dead_letter_reasons() == {"engine_error": 1}
    assert (await queue.get_prompt(prompt_id)).state == "dead_lettered"
    await assert_conserved(queue)


async def test_a_final_failure_dead_letters_at_once(queue: ReplayQueue) -> None:
    await submit(queue, 2)
    await queue.create_evaluation("e", [b"held out"])
    evaluated, first, second = await queue.lease("s", 3)
    await queue.give_back("s", evaluated, failure="prompt_too_long", is_final=True)
    await queue.give_back("s", first, failure="prompt_too_long", is_final=True)
    await queue.give_back("s", second, failure="engine_error")
    assert await queue.dead_letter_reasons() == {"prompt_too_long": 1}
    assert (await queue.get_evaluation("e")).num_finished == 1
    assert [lease.prompt_id for lease in await queue.lease("s", 3)] == [second.prompt_id]
    await assert_conserved(queue)


async def test_giving_back_without_a_failure_costs_no_attempt(queue: ReplayQueue) -> None:
    await submit(queue, 1)
    for attempt in range(1, 8):
        [lease] = await queue.lease("s", 1)
        assert lease.attempt == attempt
        await queue.give_back("s", lease)
    await assert_conserved(queue)


async def test_an_older_term_is_fenced_from_every_learner_call(make_queue: MakeQueue) -> None:
    zombie, queue = make_queue(), make_queue()
    await zombie.take_term(0)
    await submit(queue, 1)
    await finish(queue, await queue.lease("s", 1))
    await queue.take_term(0)
    for call in (
        zombie.take(1, 1), zombie.commit(1, [1]), zombie.expire(1), zombie.discard(1, "x"),
        zombie.dead_letter(1, "x"), zombie.publish(1, 1, b""), zombie.allocate_version(0), zombie.restore(0),
    ):  # fmt: skip
        with pytest.raises(Fenced):
            await call
    assert await queue.take(1, 1) == [1]


async def test_a_new_learner_gets_the_same_batches_again(make_queue: MakeQueue) -> None:
    queue, successor = make_queue(), make_queue()
    ids = await submit(queue, 4)
    await finish(queue, await queue.lease("s", 4))
    await queue.take_term(0)
    assert await queue.take(1, 1) + await queue.take(1, 1) == ids[:2]
    assert await queue.take(2, 2) == ids[2:]
    await queue.commit(1, ids[:2])

    assert await successor.take_term(0) == queue.term + 1
    assert await successor.restore(1) == {2: ids[2:]}
    assert (await successor.stat()).redelivered == 2
    assert await successor.commit(2, ids[2:]) == 2
    await assert_conserved(queue)


async def test_expiry_admits_the_prompt_again_and_tells_the_outbox(queue: ReplayQueue) -> None:
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


async def test_a_dead_letter_is_counted_by_the_first_word_of_its_reason(queue: ReplayQueue) -> None:
    ids = await submit(queue, 2)
    await finish(queue, await queue.lease("s", 2))
    await queue.take_term(0)
    await queue.take(1, 2)
    await queue.dead_letter(ids[0], "corrupt: bad magic")
    await queue.dead_letter(ids[1], "")
    await queue.dead_letter(ids[1], "twice")
    assert await queue.dead_letter_reasons() == {"corrupt": 1, "other": 1}
    await assert_conserved(queue)


async def test_a_full_queue_refuses_and_accepts_again_after_a_take(make_queue: MakeQueue) -> None:
    queue = make_queue(capacity_bytes=2**20)
    await submit(queue, 3)
    leases = await queue.lease("s", 3)
    big = b"x" * 700_000
    assert await queue.append(leases[0], big, 0) == "accepted"
    assert await queue.append(leases[1], big, 0) == "full"
    await queue.take_term(0)
    await queue.take(1, 1)
    assert await queue.append(leases[1], big, 0) == "accepted"
    await assert_conserved(queue)


async def test_reconcile_names_groups_that_redis_lost(queue: ReplayQueue) -> None:
    await submit(queue, 2)
    lost, kept = await queue.lease("s", 2)
    await finish(queue, [kept])
    outbox = await queue.reconcile([lost, kept])
    assert (outbox.settled, outbox.missing) == ((), (lost.prompt_id,))


async def test_freshest_first_takes_the_newest_version(make_queue: MakeQueue) -> None:
    queue = make_queue(selection="freshest")
    await submit(queue, 3)
    for version, lease in zip([4, 9, 2], await queue.lease("s", 3), strict=True):
        await finish(queue, [lease], version)
    await queue.take_term(0)
    assert await queue.take(1, 1) + await queue.take(1, 2) == [2, 1, 3]


async def test_versions_are_never_reused(queue: ReplayQueue) -> None:
    await queue.take_term(0)
    assert [await queue.allocate_version(0), await queue.allocate_version(0)] == [1, 2]
    await queue.take_term(0)
    assert await queue.allocate_version(1) == 3
    assert await queue.allocate_version(10) == 10


async def test_a_feed_moves_on_with_what_it_submits_and_only_then(make_queue: MakeQueue) -> None:
    queue, other = make_queue(), make_queue()
    assert await queue.feed("train", "f", 0, [], []) == FeedPosition(0, "f")
    assert await queue.feed_positions() == {}
    assert await queue.feed("train", "f", 0, [b"p0", b"p1"], [0, 5]) == FeedPosition(2, "f")
    # A lost reply, or another feeder: nothing is submitted twice.
    assert await other.feed("train", "f", 0, [b"p0", b"p1"], [0, 0]) == FeedPosition(2, "f")
    assert await other.feed("train", "f", 3, [b"p3"], [0]) == FeedPosition(2, "f")
    assert await other.feed("train", "other data", 2, [b"x"], [0]) == FeedPosition(2, "f")
    assert await other.feed("train", "f", 2, [b"p2"], [0]) == FeedPosition(3, "f")
    assert await queue.feed("more", "g", 0, [b"q0"], [0]) == FeedPosition(1, "g")
    assert await queue.feed_positions() == {"train": 3, "more": 1}
    leased = await make_queue(max_staleness=9).lease("s", 9)
    assert [lease.payload for lease in leased] == [b"p1", b"p0", b"p2", b"q0"]  # by priority, then by age
    await assert_conserved(queue)


async def test_evaluations_are_scored_and_never_queued(queue: ReplayQueue) -> None:
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
    assert (evaluation.num_samples, evaluation.pass_at) == (4, {1: 0.75, 2: 1.0})
    stat = await queue.stat()
    assert (stat.admitted, stat.in_flight) == (0, 0)


async def test_the_newest_score_of_a_benchmark_is_kept(queue: ReplayQueue) -> None:
    for evaluation_id, rewards in (("math-10", [1.0, 0.0]), ("math-20", [1.0, 1.0]), ("other", [0.0])):
        await queue.create_evaluation(evaluation_id, [b"q"])
        [lease] = await queue.lease("s", 5)
        await queue.record_evaluation(evaluation_id, lease, rewards, 0, 0)
    await queue.create_evaluation("math-30", [b"q1", b"q2"])
    lease, _ = await queue.lease("s", 5)
    await queue.record_evaluation("math-30", lease, [0.0], 0, 0)
    assert await queue.evaluation_scores() == {"math": 1.0, "other": 0.0}, "one that is not finished has no score"


async def test_ages_are_of_what_is_next_in_line(queue: ReplayQueue) -> None:
    stat = await queue.stat()
    assert (stat.pending_age_ms, stat.ready_age_ms) == (0, 0)
    await submit(queue, 1)
    await asyncio.sleep(0.1)
    await submit(queue, 2)
    assert (await queue.stat()).pending_age_ms >= 100
    first, second = await queue.lease("s", 2)
    assert (await queue.stat()).pending_age_ms < 100
    await finish(queue, [first])
    await asyncio.sleep(0.1)
    await finish(queue, [second])
    assert (await queue.stat()).ready_age_ms >= 100
    await queue.take_term(0)
    await queue.take(1, 1)
    assert (await queue.stat()).ready_age_ms < 100


async def test_a_discarded_prompt_is_finished_and_makes_room_for_another(queue: ReplayQueue) -> None:
    ids = await submit(queue, 5)
    leases = await queue.lease("s", 5)
    await finish(queue, leases)
    assert len(leases) == 4 and (await queue.stat()).admission_room == 0
    await queue.take_term(0)
    await queue.take(1, 2)
    await queue.discard(ids[0], "no_spread: all rewards are 1")
    await queue.discard(ids[0], "no_spread")
    stat = await queue.stat()
    assert (stat.expired, stat.discarded, stat.queued, stat.admission_room) == (1, 1, 3, 1)
    assert await queue.expired_reasons() == {"no_spread": 1}
    assert [lease.prompt_id for lease in await queue.lease("s", 5)] == [ids[4]]
    with pytest.raises(NotFound):
        await queue.get_prompt(ids[0])
    assert (await queue.reconcile([leases[0]])).settled == (ids[0],)
    assert await queue.append(leases[0], b"late", 0) == "unknown"
    await assert_conserved(queue)


async def test_a_manifest_with_discarded_groups_is_delivered_again_without_them(make_queue: MakeQueue) -> None:
    queue, successor = make_queue(), make_queue()
    ids = await submit(queue, 4)
    await finish(queue, await queue.lease("s", 4))
    await queue.take_term(0)
    await queue.take(1, 2)
    await queue.discard(ids[0], "no_spread")
    await successor.take_term(0)
    assert await successor.restore(0) == {1: ids[:2]}
    assert [delivery.prompt_id for delivery in await successor.fetch(ids[:2])] == [ids[1]]
    assert await successor.take(1, 1) == [ids[2]]
    assert await successor.commit(1, ids[1:3]) == 2
    stat = await successor.stat()
    assert (stat.trained, stat.redelivered, stat.queued) == (2, 1, 1)
    await assert_conserved(queue)


async def test_a_take_whose_answer_was_lost_is_answered_again(make_queue: MakeQueue) -> None:
    """The batch keeps its size: nothing is taken on top of what the learner has not heard of."""
    queue, successor = make_queue(), make_queue()
    ids = await submit(queue, 4)
    await finish(queue, await queue.lease("s", 4))
    await successor.take_term(0)
    queue.term = successor.term  # as if the same learner: `successor` never sees these answers
    assert await queue.take(1, 1) + await queue.take(1, 1) == ids[:2]
    assert await successor.take(1, 1) == ids[:2]
    assert await successor.take(1, 1) == [ids[2]]
    assert await successor.commit(1, ids[:3]) == 3
    await assert_conserved(queue)


async def test_what_a_closed_manifest_still_holds_is_ready_again(queue: ReplayQueue) -> None:
    """Redis lost its tail: what the learner trained is not all that the manifest holds."""
    ids = await submit(queue, 4)
    await finish(queue, await queue.lease("s", 4))
    await queue.take_term(0)
    left = await queue.take(1, 2)
    trained = await queue.take(1, 2)
    before = (await queue.stat()).queued_bytes
    assert await queue.commit(1, trained) == 2
    assert (await queue.stat()).queued_bytes - before == sum(len(b"group of %d" % prompt_id) for prompt_id in left)
    assert await queue.take(2, 4) == left == ids[:2]
    await assert_conserved(queue)


async def test_fifo_is_the_order_of_admission(queue: ReplayQueue) -> None:
    ids = await submit(queue, 3)
    await finish(queue, (await queue.lease("s", 3))[::-1])
    await queue.take_term(0)
    assert await queue.take(1, 3) == ids


async def test_other_policies_pass_a_straggler_by(make_queue: MakeQueue) -> None:
    for step, policy in enumerate(("drop", "correct"), start=1):
        queue = make_queue(stale_policy=policy, max_staleness=9)
        await submit(queue, 2)
        _, fast = await queue.lease("s", 2)
        await finish(queue, [fast])
        await queue.take_term(0)
        assert await queue.take(step, 2) == [fast.prompt_id]


async def test_wait_takes_nothing_admitted_after_a_prompt_in_flight(make_queue: MakeQueue) -> None:
    queue = make_queue(stale_policy="wait")
    ids = await submit(queue, 4)
    first, straggler, third, fourth = await queue.lease("s", 4)
    await queue.take_term(0)
    await finish(queue, [fourth, third, first])
    assert await queue.take(1, 4) == ids[:1]
    await queue.give_back("s", straggler, failure="oops")
    assert await queue.take(1, 4) == []
    [again] = await queue.lease("s", 4)
    await finish(queue, [again])
    assert await queue.take(1, 4) == ids[1:]
    await assert_conserved(queue)


async def test_wait_goes_on_when_the_straggler_is_buried(make_queue: MakeQueue) -> None:
    queue = make_queue(stale_policy="wait", max_attempts=1)
    ids = await submit(queue, 3)
    straggler, *others = await queue.lease("s", 3)
    await finish(queue, others)
    await queue.take_term(0)
    assert await queue.take(1, 3) == []
    await queue.give_back("s", straggler, failure="oops")
    assert await queue.take(1, 3) == ids[1:]


async def test_wait_numbers_an_expired_prompt_anew(make_queue: MakeQueue) -> None:
    queue = make_queue(stale_policy="wait", max_staleness=9)
    ids = await submit(queue, 3)
    await finish(queue, await queue.lease("s", 3))
    await queue.take_term(0)
    await queue.take(1, 1)
    await queue.expire(ids[0])
    assert await queue.take(1, 1) == [ids[1]]
    [again] = await queue.lease("s", 1)
    assert await queue.take(1, 5) == [ids[2]]
    await finish(queue, [again])
    assert await queue.take(1, 5) == [ids[0]]


async def test_a_returned_prompt_is_leased_before_better_ones_without_admission(make_queue: MakeQueue) -> None:
    """Else, under `wait`, the groups that wait for it would hold the room that those need."""
    queue = make_queue(stale_policy="wait", max_staleness=0)
    await queue.submit([b"slow", b"fast"], [0, 0], "")
    slow, fast = await queue.lease("s", 2)
    await finish(queue, [fast])
    await queue.submit([b"urgent"], [9], "")
    await queue.give_back("s", slow)
    assert [lease.payload for lease in await queue.lease("s", 1)] == [b"slow"]
    assert await queue.lease("s", 1) == []


async def test_wait_has_room_for_the_group_that_a_full_queue_waits_for(make_queue: MakeQueue) -> None:
    queue = make_queue(stale_policy="wait", capacity_bytes=2**20)
    await submit(queue, 4)
    first, second, third, fourth = await queue.lease("s", 4)
    big = b"x" * 700_000
    assert await queue.append(third, big, 0) == "accepted"
    assert [await queue.append(lease, big, 0) for lease in (fourth, second)] == ["full", "full"]
    await queue.give_back("s", first)
    [first] = await queue.lease("s", 4)
    assert await queue.append(first, big, 0) == "accepted"
    assert await queue.append(second, big, 0) == "full"
    await queue.take_term(0)
    assert await queue.take(1, 4) == [first.prompt_id]
    assert await queue.append(second, big, 0) == "accepted"
    assert await queue.take(1, 4) == [second.prompt_id, third.prompt_id]
    await assert_conserved(queue)


async def test_a_full_queue_admits_nothing_new(make_queue: MakeQueue) -> None:
    queue = make_queue(capacity_bytes=2**20)
    await submit(queue, 4)
    first, second = await queue.lease("s", 2)
    await queue.append(first, b"x" * 2**20, 0)
    assert await queue.lease("s", 1) == []
    await queue.give_back("s", second)
    assert [lease.prompt_id for lease in await queue.lease("s", 4)] == [second.prompt_id]


async def test_stat_shows_the_limiter_as_samples_per_insert(queue: ReplayQueue) -> None:
    await submit(queue, 8)
    await finish(queue, await queue.lease("s", 3))
    stat = await queue.stat()
    assert (stat.admission_limit, stat.admission_room, stat.inserted, stat.samples_per_insert) == (4, 1, 3, 0.0)
    await queue.take_term(0)
    await queue.commit(1, await queue.take(1, 2))
    await queue.publish(1, 1, b"")
    stat = await queue.stat()
    assert (stat.admission_limit, stat.admission_room, stat.inserted) == (6, 3, 3)
    assert stat.samples_per_insert == pytest.approx(2 / 3)
    assert len(await queue.lease("s", 8)) == stat.admission_room


async def lease_again(queue: ReplayQueue, server_id: str) -> Lease:
    """Lease the one prompt as soon as its first lease has run out."""
    async with asyncio.timeout(20):
        while True:
            leases = await queue.lease(server_id, 1)
            if leases:
                return leases[0]
            await asyncio.sleep(0.01)


async def test_groups_handed_in_together_have_an_outcome_each(queue: ReplayQueue) -> None:
    await submit(queue, 3)
    first, second, third = await queue.lease("s", 3)
    unknown = replace(third, prompt_id=99)
    groups = [FinishedGroup(lease, b"x", 0) for lease in (first, second, first, unknown)]
    assert await queue.append_many(groups) == ["accepted", "accepted", "duplicate", "unknown"]
    await assert_conserved(queue)


async def test_a_held_out_prompt_that_keeps_failing_does_not_hold_up_its_evaluation(queue: ReplayQueue) -> None:
    await queue.create_evaluation("heldout", [b"good", b"bad"])
    good, bad = await queue.lease("s", 5)
    await queue.record_evaluation("heldout", good, [1.0], 0, 0)
    for _ in range(queue.config.max_attempts - 1):
        await queue.give_back("s", bad, failure="engine_error")
        [bad] = await queue.lease("s", 5)
    await queue.give_back("s", bad, failure="engine_error")
    assert await queue.lease("s", 5) == []
    evaluation = await queue.get_evaluation("heldout")
    assert (evaluation.num_finished, evaluation.score) == (2, 1.0)
    await assert_conserved(queue)


async def test_a_store_has_one_name(make_queue: MakeQueue) -> None:
    name = await make_queue().store_id()
    assert name and await make_queue().store_id() == name


async def test_a_prompt_is_leased_after_it_has_settled(make_queue: MakeQueue) -> None:
    queue = make_queue(settle_s=0.2)
    await queue.submit([b"young"], [0], "")
    await queue.create_evaluation("young too", [b"held out"])
    assert await queue.lease("s", 5) == []
    leases = [await lease_again(queue, "s"), await lease_again(queue, "s")]
    assert {lease.payload for lease in leases} == {b"young", b"held out"}


async def test_an_unsettled_prompt_of_high_priority_holds_up_nobody(make_queue: MakeQueue) -> None:
    await make_queue().submit([b"old"], [0], "")
    assert await make_queue().lease("s", 0) == []
    queue = make_queue(settle_s=60)
    await queue.submit([b"young"] * 3, [9] * 3, "")
    assert [lease.payload for lease in await queue.lease("s", 2)] == [b"old"]
