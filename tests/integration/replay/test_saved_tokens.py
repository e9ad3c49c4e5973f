"""Saved tokens: the lease's holder alone writes them, the next lease reads them, and they end with the flight."""

from __future__ import annotations

import pytest

from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease, SavedTokens
from penstock.replay.results import PromptBook
from penstock.store.fleet import Fleet, Quarantine, Quarantines, ServerRecord
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import (
    MakeQueue,
    ReplayQueue,
    assert_conserved,
    finish,
    lease_again,
    queue_maker,
    queue_of_backend,
    submit,
)

__all__ = ["queue_maker", "queue_of_backend"]
PIECES = [SavedTokens(0, 0, b"zero"), SavedTokens(0, 256, b"more"), SavedTokens(1, 0, b"one")]


async def save(queue: ReplayQueue, server: str, lease: Lease, pieces: list[SavedTokens] = PIECES) -> list[int]:
    return await queue.save_tokens(server, [(lease, piece) for piece in pieces])


async def leased(queue: ReplayQueue, server: str = "a") -> Lease:
    await submit(queue, 1)
    [lease] = await queue.lease(server, 1)
    return lease


async def test_the_next_lease_finds_what_the_last_one_saved(make_queue: MakeQueue) -> None:
    queue = make_queue(lease_ttl_s=0.05)
    first = await leased(queue)
    assert await save(queue, "a", first) == []
    assert await save(queue, "a", first, PIECES[:1]) == [], "a repetition replaces it"
    second = await lease_again(queue, "b")
    assert (second.prompt_id, second.attempt) == (first.prompt_id, 2)
    assert await queue.saved_tokens(second) == PIECES
    assert (await queue.stat()).saved_bytes == sum(len(piece.payload) for piece in PIECES)
    await assert_conserved(queue)


async def test_a_server_that_lost_its_lease_can_neither_overwrite_nor_forget(make_queue: MakeQueue) -> None:
    queue = make_queue(lease_ttl_s=0.05)
    zombie = await leased(queue)
    await save(queue, "a", zombie)
    lease = await lease_again(queue, "b")
    assert await save(queue, "a", zombie, [SavedTokens(0, 0, b"late")]) == [zombie.prompt_id]
    assert await save(queue, "b", zombie, [SavedTokens(0, 0, b"late")]) == [zombie.prompt_id]
    await queue.forget_tokens("a", zombie)
    assert await queue.saved_tokens(lease) == PIECES
    await queue.forget_tokens("b", lease)
    assert await queue.saved_tokens(lease) == []
    assert (await queue.stat()).saved_bytes == 0


@pytest.mark.parametrize("end", ["append", "cancel", "dead_letter", "forget_saved", "rewind"])
async def test_the_end_of_the_flight_deletes_them(make_queue: MakeQueue, end: str) -> None:
    queue = make_queue(max_attempts=1)
    lease = await leased(queue)
    await save(queue, "a", lease)
    match end:
        case "append":
            await finish(queue, [lease])
        case "cancel":
            await (queue if isinstance(queue, MemoryReplayQueue) else PromptBook(queue.client, queue.run)).cancel(
                [lease.prompt_id]
            )
        case "dead_letter":
            await queue.give_back("a", lease, "oops", is_final=True)
        case "forget_saved":
            await queue.give_back("a", lease, forget_saved=True)
        case "rewind":
            await queue.take_term(0)
            await queue.rewind("checkpoint", 0, [])
    assert await queue.saved_tokens(lease) == []
    assert (await queue.stat()).saved_bytes == 0
    assert await save(queue, "a", lease) == ([] if end == "rewind" else [lease.prompt_id] * 3)
    await assert_conserved(queue)


async def test_held_out_prompts_keep_them_until_they_are_recorded(queue: ReplayQueue) -> None:
    await queue.create_evaluation("heldout", [b"question"])
    [lease] = await queue.lease("a", 1)
    await save(queue, "a", lease)
    await queue.give_back("a", lease)
    [lease] = await queue.lease("b", 1)
    assert await queue.saved_tokens(lease) == PIECES
    await queue.record_evaluation("heldout", lease, [1.0], 0, 0)
    assert (await queue.saved_tokens(lease), (await queue.stat()).saved_bytes) == ([], 0)


async def test_they_have_a_share_of_the_memory(make_queue: MakeQueue) -> None:
    queue = make_queue(capacity_bytes=2**20)
    lease = await leased(queue)
    assert await save(queue, "a", lease, [SavedTokens(0, 0, b"x" * 2**18)]) == []
    assert await save(queue, "a", lease, [SavedTokens(1, 0, b"x")]) == [lease.prompt_id]
    assert await save(queue, "a", lease, [SavedTokens(0, 0, b"x"), SavedTokens(1, 0, b"x")]) == []
    assert (await queue.stat()).saved_bytes == 2


async def test_nothing_of_a_server_in_quarantine_is_continued(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=8)
    await submit(queue, 2)
    [bad] = await queue.lease("bad", 1)
    [good] = await queue.lease("good", 1)
    await save(queue, "bad", bad)
    await save(queue, "good", good)
    if isinstance(queue, MemoryReplayQueue):
        queue.store.quarantine("bad", 1)
    else:
        await Fleet(queue.client, "test").join(ServerRecord("bad", "127.0.0.1:1", "torch"))
        record = Quarantine("bad", 0.3, 0.1, policy_version=2, since_ms=17, probes_left=1)
        await Quarantines(queue.client, "test").put(record, (await queue.stat()).term)
    assert await queue.saved_tokens(bad) == []
    assert await queue.saved_tokens(good) == PIECES
    assert await save(queue, "bad", bad) == [bad.prompt_id] * 3, "it may save nothing while it is in quarantine"
    assert (await queue.stat()).saved_bytes == sum(len(piece.payload) for piece in PIECES)


async def test_saved_tokens_leave_no_key_behind(queue: RedisReplayQueue) -> None:
    if not isinstance(queue, RedisReplayQueue):
        pytest.skip("keys are Redis'")
    lease = await leased(queue)
    await save(queue, "a", lease)
    await finish(queue, [lease])
    assert [key async for key in queue.client.scan_iter("*saved*")] == []
