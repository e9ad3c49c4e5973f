"""Conformance suite of replay backends: manifests, the order of takes and leases, and admission."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import NotFound
from penstock.replay.queue_types import FinishedGroup, Lease
from support.replay_backends import (  # noqa: F401 the fixtures
    MakeQueue,
    ReplayQueue,
    assert_conserved,
    finish,
    lease_again,
    queue_maker,
    queue_of_backend,
    submit,
)


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
    assert (await queue.reconcile([leases[0]])).done == (ids[0],)
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
    assert await successor.rewind_step(0, 0) == {1: ids[1:2]}
    assert [delivery.prompt_id for delivery in await successor.fetch(ids[:2])] == [ids[1]]
    assert await successor.take(1, 1) == [ids[2]]
    assert await successor.commit(1, ids[1:3]) == 2
    stat = await successor.stat()
    assert (stat.trained, stat.redelivered, stat.queued) == (2, 1, 1)
    await assert_conserved(queue)


async def test_a_take_whose_answer_was_lost_is_answered_again(make_queue: MakeQueue) -> None:
    """The batch keeps its size: no more groups are taken while the learner does not know those in the manifest."""
    queue, successor = make_queue(), make_queue()
    ids = await submit(queue, 4)
    await finish(queue, await queue.lease("s", 4))
    await successor.take_term(0)
    queue.term = successor.term  # acts as the same learner: `successor` never sees these answers
    assert await queue.take(1, 1) + await queue.take(1, 1) == ids[:2]
    assert await successor.take(1, 1) == ids[:2]
    assert await successor.take(1, 1) == [ids[2]]
    assert await successor.commit(1, ids[:3]) == 3
    await assert_conserved(queue)


async def test_what_a_closed_manifest_still_holds_is_ready_again(queue: ReplayQueue) -> None:
    """Redis lost its tail, so the manifest holds groups that the learner has not trained."""
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


async def test_wait_goes_on_when_the_straggler_is_dead_lettered(make_queue: MakeQueue) -> None:
    queue = make_queue(stale_policy="wait", max_attempts=1)
    ids = await submit(queue, 3)
    straggler, *others = await queue.lease("s", 3)
    await finish(queue, others)
    await queue.take_term(0)
    assert await queue.take(1, 3) == []
    await queue.give_back("s", straggler, failure="oops")
    assert await queue.take(1, 3) == ids[1:]


async def test_wait_keeps_the_order_of_prompts_whose_leases_redis_has_lost(make_queue: MakeQueue) -> None:
    """Redis lost its tail: the prompts are pending again, and their groups come in another order."""
    queue = make_queue(stale_policy="wait", groups_per_step=8)
    first, second, third, *others = await submit(queue, 6)
    [urgent] = (await queue.submit([b"urgent"], [1], "")).prompt_ids
    leases = [Lease(prompt_id, 1, b"") for prompt_id in (third, second)]
    assert await queue.append_many([FinishedGroup(lease, b"x", 0) for lease in leases]) == ["accepted"] * 2
    await queue.take_term(0)
    assert await queue.take(1, 8) == [], "the first one is waited for"
    await assert_conserved(queue)
    again, *later = await queue.lease("s", 8)
    assert [lease.prompt_id for lease in (again, *later)] == [first, urgent, *others]
    await finish(queue, [*later, again])
    assert await queue.take(1, 8) == [first, second, third, urgent, *others]
    await assert_conserved(queue)


async def test_wait_numbers_an_expired_prompt_again(make_queue: MakeQueue) -> None:
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
    """Otherwise, under `wait`, the groups that wait for it would take the room that it needs."""
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


async def test_groups_that_are_appended_together_have_an_outcome_each(queue: ReplayQueue) -> None:
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


async def test_a_prompt_is_leased_after_its_id_is_durable(make_queue: MakeQueue) -> None:
    queue = make_queue(loss_window_s=0.2)
    await queue.submit([b"young"], [0], "")
    await queue.create_evaluation("young too", [b"held out"])
    assert await queue.lease("s", 5) == []
    leases = [await lease_again(queue, "s"), await lease_again(queue, "s")]
    assert {lease.payload for lease in leases} == {b"young", b"held out"}


async def test_a_prompt_of_high_priority_that_is_not_durable_delays_no_other(make_queue: MakeQueue) -> None:
    await make_queue().submit([b"old"], [0], "")
    assert await make_queue().lease("s", 0) == []
    queue = make_queue(loss_window_s=60)
    await queue.submit([b"young"] * 3, [9] * 3, "")
    assert [lease.payload for lease in await queue.lease("s", 2)] == [b"old"]
