"""Conformance suite of replay backends: every transition of the diagram in penstock/replay/queue.py."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from penstock.errors import Fenced
from penstock.replay.queue_types import FeedPosition
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


async def test_submission_with_the_same_key_is_accepted_once(queue: ReplayQueue) -> None:
    first = await queue.submit([b"a", b"b"], [0, 0], "key")
    again = await queue.submit([b"a", b"b"], [0, 0], "key")
    assert again.prompt_ids == first.prompt_ids
    assert (first.replayed, again.replayed) == (False, True)
    assert (await queue.stat()).pending_prompts == 2


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


@pytest.mark.parametrize(("per_step", "num_leased"), [(1, [0, 1]), (2, [1, 2]), (4, [5, 4])])
async def test_admission_counts_trained_groups_when_a_run_goes_on_with_other_steps(
    make_queue: MakeQueue, per_step: int, num_leased: list[int]
) -> None:
    """The checkpoint is of step 3, with 2 groups a step. The batch of step 4 was taken; the successor trains it.
    Once it is published, two steps of `per_step` groups wait, as max_staleness 1 allows."""
    queue, successor = make_queue(), make_queue(groups_per_step=per_step)
    await submit(queue, 40)
    await queue.take_term(0)
    for step in range(1, 4):
        await finish(queue, await queue.lease("s", 2))
        await queue.commit(step, await queue.take(step, 2))
        await queue.publish(step, step, b"")
    await finish(queue, await queue.lease("s", 3))
    batch = await queue.take(4, 2)

    await successor.take_term(0)
    assert await successor.rewind_step(3, 6) == {4: batch}
    leases = await successor.lease("s", 20)
    assert len(leases) == num_leased[0]
    await finish(successor, leases)
    if per_step > len(batch):
        batch += await successor.take(4, per_step - len(batch))
    await successor.commit(4, batch)
    await successor.publish(4, 4, b"")
    assert (await successor.stat()).admission_room == len(await successor.lease("s", 20)) == num_leased[1]
    stat = await successor.stat()
    assert stat.queued + stat.in_flight == 2 * per_step
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
    assert await queue.prompts([ids[1], 99, ids[0]]) == [leases[1].payload, b"", leases[0].payload]
    assert await queue.commit(1, ids) == 2
    assert await queue.prompts(ids) == [b"", b""]
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


async def test_a_commit_covers_groups_that_were_not_taken(queue: ReplayQueue) -> None:
    """Redis may have lost that a learner took them."""
    await submit(queue, 3)
    await queue.take_term(0)
    leases = await queue.lease("s", 3)
    for num_bytes, lease in enumerate(leases, start=10):
        await queue.append(lease, b"g" * num_bytes, 0)
    await queue.take(1, 1)
    assert (await queue.stat()).queued_bytes == 11 + 12
    assert await queue.commit(1, [lease.prompt_id for lease in leases[:2]]) == 2
    stat = await queue.stat()
    assert (stat.trained, stat.queued, stat.queued_bytes) == (2, 1, 12)
    await assert_conserved(queue)


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
        zombie.dead_letter(1, "x"), zombie.publish(1, 1, b""), zombie.allocate_version(0), zombie.rewind_step(0, 0),
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
    assert await successor.rewind_step(1, 2) == {2: ids[2:]}
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
    assert (await queue.reconcile([lease])).done == (prompt_id,)
    stat = await queue.stat()
    assert (stat.expired, stat.pending_prompts, stat.admitted) == (1, 1, 1)
    [again] = await queue.lease("s", 1)
    assert again.prompt_id == prompt_id and again.attempt > lease.attempt
    assert (await queue.stat()).admitted == 2
    await assert_conserved(queue)


@pytest.mark.parametrize("how", ["expire", "discard", "dead_letter"])
async def test_a_group_that_is_dropped_leaves_the_manifest_of_its_step(make_queue: MakeQueue, how: str) -> None:
    queue, successor = make_queue(), make_queue()
    dropped, kept = await submit(queue, 2)
    await finish(queue, await queue.lease("s", 2))
    await queue.take_term(0)
    await queue.take(1, 2)
    await getattr(queue, how)(dropped, "reason")
    await successor.take_term(0)
    assert await successor.rewind_step(0, 0) == {1: [kept]}


async def test_an_expired_prompt_that_was_taken_for_a_later_step_stays_with_that_step(make_queue: MakeQueue) -> None:
    """The learner reads ahead: it takes the prompt for step 2 before step 1 is committed."""
    queue, successor = make_queue(), make_queue()
    expired, trained = await submit(queue, 2)
    await finish(queue, await queue.lease("s", 2))
    await queue.take_term(0)
    await queue.take(1, 2)
    await queue.expire(expired)
    await finish(queue, await queue.lease("s", 1))
    assert await queue.take(2, 1) == [expired]
    await queue.commit(1, [trained])
    assert await queue.take(3, 1) == [], "no other step takes it"
    await successor.take_term(0)
    assert await successor.rewind_step(1, 2) == {2: [expired]}
    assert await successor.commit(2, [expired]) == 1
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
    assert (outbox.done, outbox.missing) == ((), (lost.prompt_id,))


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
    assert await queue.feeds() == {}
    assert await queue.feed("train", "f", 0, [b"p0", b"p1"], [0, 5]) == FeedPosition(2, "f")
    # The answer was lost, or another feeder was faster: nothing is submitted twice.
    assert await other.feed("train", "f", 0, [b"p0", b"p1"], [0, 0]) == FeedPosition(2, "f")
    assert await other.feed("train", "f", 3, [b"p3"], [0]) == FeedPosition(2, "f")
    assert await other.feed("train", "other data", 2, [b"x"], [0]) == FeedPosition(2, "f")
    assert await other.feed("train", "f", 2, [b"p2"], [0]) == FeedPosition(3, "f")
    assert await queue.feed("more", "g", 0, [b"q0"], [0]) == FeedPosition(1, "g")
    assert {name: feed.position for name, feed in (await queue.feeds()).items()} == {"train": 3, "more": 1}
    assert (await queue.feed("train", "f", 0, [], [], epoch_prompts=3)).epoch_prompts == 3
    assert (await other.feed("train", "other data", 0, [], [], epoch_prompts=9)).epoch_prompts == 3
    feeds = await other.feeds()
    assert [feeds["train"].has_ended(epochs) for epochs in (0, 1, 2)] == [False, True, False]
    assert not feeds["more"].has_ended(1), "nobody has said how long it is"
    leased = await make_queue(max_staleness=9).lease("s", 9)
    assert [lease.payload for lease in leased] == [b"p1", b"p0", b"p2", b"q0"]  # by priority, then by age
    await assert_conserved(queue)


async def test_the_learner_of_the_current_term_says_that_the_run_has_finished(make_queue: MakeQueue) -> None:
    queue, older = make_queue(), make_queue()
    assert (await queue.stat()).finished_step == -1
    await older.take_term(0)
    await queue.take_term(0)
    with pytest.raises(Fenced):
        await older.finish(3)
    await queue.finish(0)
    assert (await queue.stat()).finished_step == 0


async def test_ages_are_of_what_is_next_in_line(queue: ReplayQueue) -> None:
    """The second of two is 100 ms younger than the first, however much time passes between two questions."""
    stat = await queue.stat()
    assert (stat.pending_age_ms, stat.ready_age_ms) == (0, 0)
    await submit(queue, 1)
    await asyncio.sleep(0.1)
    await submit(queue, 2)
    asked_s, age_of_first_ms = time.monotonic(), (await queue.stat()).pending_age_ms
    assert age_of_first_ms >= 100
    first, second = await queue.lease("s", 2)
    age_of_third_ms = (await queue.stat()).pending_age_ms
    assert age_of_third_ms <= age_of_first_ms - 100 + ms_since(asked_s)

    await finish(queue, [first])
    await asyncio.sleep(0.1)
    await finish(queue, [second])
    asked_s, age_of_first_ms = time.monotonic(), (await queue.stat()).ready_age_ms
    assert age_of_first_ms >= 100
    await queue.take_term(0)
    await queue.take(1, 1)
    age_of_second_ms = (await queue.stat()).ready_age_ms
    assert age_of_second_ms <= age_of_first_ms - 100 + ms_since(asked_s)


def ms_since(time_s: float) -> float:
    """Milliseconds since a reading of the monotonic clock, with 2 ms for ages that are rounded."""
    return 1000 * (time.monotonic() - time_s) + 2


async def test_an_empty_commit_only_tells_a_learner_whether_its_term_has_passed(make_queue: MakeQueue) -> None:
    queue, successor = make_queue(), make_queue()
    await submit(queue, 4)
    await queue.take_term(0)
    await finish(queue, await queue.lease("s", 2))
    await queue.take(1, 2)
    before = await queue.stat()
    assert await queue.commit(0, []) == 0
    assert replace(await queue.stat(), pending_age_ms=0, ready_age_ms=0) == replace(
        before, pending_age_ms=0, ready_age_ms=0
    )
    await successor.take_term(0)
    with pytest.raises(Fenced):
        await queue.commit(0, [])
