"""Submissions that are joined into one exchange with Redis: each is accepted as if it were alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.errors import DeadlineExceeded, PenstockError, QueueFull
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import PromptRequest, Submission
from penstock_services.gateway.prompts import MAX_REQUESTS, JoinedSubmissions


async def test_requests_that_are_joined_get_their_own_ids_and_keep_their_keys(queue: RedisReplayQueue) -> None:
    await queue.submit([b"first", b"second"], [0, 0], "old")
    joined = JoinedSubmissions(queue, deadline_s=100)
    asked = [(f"{n}", 1 + n % 3, f"key {n % 7}" if n % 2 else "") for n in range(2 * MAX_REQUESTS)]
    asked.insert(5, ("again", 2, "old"))
    answers = await asyncio.gather(
        *(joined.submit(PromptRequest([name.encode()] * n, [0] * n, key)) for name, n, key in asked)
    )

    known: dict[str, Submission] = {"old": Submission((1, 2), replayed=False)}
    expected: dict[int, bytes] = {1: b"first", 2: b"second"}
    for (name, count, key), answer in zip(asked, answers, strict=True):
        assert answer.replayed == (key in known)
        if answer.replayed:
            ids = known[key].prompt_ids
            assert answer.prompt_ids == (ids if len(ids) == count else ()), "the key stands for another request"
            continue
        assert answer.prompt_ids == tuple(range(len(expected) + 1, len(expected) + 1 + count)), "in order of arrival"
        expected |= dict.fromkeys(answer.prompt_ids, name.encode())
        if key:
            known[key] = answer
    assert len(known) == 8
    assert {prompt_id: (await queue.get_prompt(prompt_id)).payload for prompt_id in expected} == expected
    assert (await queue.stat()).pending_prompts == len(expected)


async def test_prompts_of_joined_requests_are_leased_by_priority(queue: RedisReplayQueue) -> None:
    joined = JoinedSubmissions(queue, deadline_s=100)
    await asyncio.gather(
        joined.submit(PromptRequest([b"late"], [-1])),
        joined.submit(PromptRequest([b"normal", b"early"], [0, 5])),
        joined.submit(PromptRequest([b"first"], [7])),
    )
    leases = await queue.lease("s", 4)
    assert [lease.payload for lease in leases] == [b"first", b"early", b"normal", b"late"]


async def test_every_request_has_its_deadline_and_those_after_it_are_served(
    queue: RedisReplayQueue, redis_client: Any
) -> None:
    patient, joined = JoinedSubmissions(queue, deadline_s=100), JoinedSubmissions(queue, deadline_s=0.2)
    assert (await patient.submit(PromptRequest([b"a"], [0], ""))).prompt_ids == (1,)
    loop, ended_at = asyncio.get_running_loop(), list[float]()
    await redis_client.client_pause(600_000, all=False)  # scripts wait until the pause is ended
    try:
        sent = asyncio.create_task(joined.submit(PromptRequest([b"b"], [0], "b")))
        await asyncio.sleep(0.1)
        asked_at = loop.time()
        waiting = asyncio.create_task(joined.submit(PromptRequest([b"c"], [0], "")))
        waiting.add_done_callback(lambda _: ended_at.append(loop.time()))
        with pytest.raises(DeadlineExceeded, match="longer than 0.2 s"):
            await sent
        with pytest.raises(DeadlineExceeded):
            await waiting
    finally:
        await redis_client.client_unpause()
    assert ended_at[0] - asked_at > 0.19, "it came later"
    assert joined._sender is not None
    async with asyncio.timeout(100):
        await joined._sender
    again = await patient.submit(PromptRequest([b"b"], [0], "b"))
    assert (again.prompt_ids, again.replayed) == ((2,), True), "submissions in progress were accepted, once"


async def test_a_request_that_redis_refuses_fails_alone(
    queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a poison that no check knows: the requests of its exchange are sent again, one by one."""
    submit_many = queue.submit_many

    async def refuse(requests: list[PromptRequest]) -> list[Submission]:
        if any(b"poison" in request.payloads for request in requests):
            raise PenstockError("Redis refused a command")
        return await submit_many(requests)

    monkeypatch.setattr(queue, "submit_many", refuse)
    joined = JoinedSubmissions(queue, deadline_s=100)
    payloads = [b"poison" if n == 3 else b"%d" % n for n in range(MAX_REQUESTS)]
    answers = await asyncio.gather(
        *(joined.submit(PromptRequest([payload], [0], "")) for payload in payloads), return_exceptions=True
    )
    assert isinstance(answers.pop(3), PenstockError)
    assert [getattr(answer, "prompt_ids", answer) for answer in answers] == [(n,) for n in range(1, MAX_REQUESTS)]


async def test_a_request_that_was_accepted_alone_is_answered_with_its_ids_whatever_the_next_one_meets(
    queue: RedisReplayQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its client would send it again, and it would be trained twice."""
    submit_many = queue.submit_many

    async def with_full_queue(requests: list[PromptRequest]) -> list[Submission]:
        if len(requests) > 1:
            raise PenstockError("a poison")
        if b"last" in requests[0].payloads:
            raise QueueFull("no memory")
        return await submit_many(requests)

    monkeypatch.setattr(queue, "submit_many", with_full_queue)
    joined = JoinedSubmissions(queue, 100.0)
    first, last = await asyncio.gather(
        *(joined.submit(PromptRequest([payload], [0], "")) for payload in (b"first", b"last")), return_exceptions=True
    )
    assert first == Submission((1,), replayed=False) and isinstance(last, QueueFull)


@pytest.mark.parametrize("key", ["idempotency:bad", "prompts", "priorities", "pending", "submitted", "lease_signals"])
async def test_a_script_that_fails_has_stored_neither_prompts_nor_keys(queue: RedisReplayQueue, key: str) -> None:
    """Otherwise the repeated request would be answered with the ids of prompts that were never stored."""
    name = queue.keys.prefix + key
    await queue.client.delete(name)
    await queue.client.set(name, "of another type")
    before = set(await queue.client.keys("*"))
    with pytest.raises(PenstockError):
        await queue.submit_many([PromptRequest([b"first"], [1], "good"), PromptRequest([b"second"], [0], "bad")])
    assert set(await queue.client.keys("*")) == before
    await queue.client.delete(name)
    good, bad = await queue.submit_many(
        [PromptRequest([b"first"], [1], "good"), PromptRequest([b"second"], [0], "bad")]
    )
    assert (good.replayed, bad.replayed) == (False, False)
    assert [(await queue.get_prompt(found)).payload for found in (*good.prompt_ids, *bad.prompt_ids)] == [
        b"first",
        b"second",
    ]


async def test_a_key_repeated_within_one_exchange_is_one_submission(queue: RedisReplayQueue) -> None:
    first, again = await queue.submit_many([PromptRequest([b"a"], [0], "key"), PromptRequest([b"a"], [0], "key")])
    assert (first.prompt_ids, first.replayed, again.prompt_ids, again.replayed) == ((1,), False, (1,), True)
    assert (await queue.stat()).pending_prompts == 1


async def test_a_key_stands_for_one_body_of_one_owner(queue: RedisReplayQueue) -> None:
    def asked(owner: str, digest: str, count: int = 1) -> PromptRequest:
        return PromptRequest([b"a"] * count, [0] * count, "key", owner, digest)

    both = await queue.submit_many([asked("alice", "1"), asked("bob", "1")])
    assert [answer.prompt_ids for answer in both] == [(1,), (2,)]
    for owner, own_id in (("alice", 1), ("bob", 2)):
        assert await queue.submit_many([asked(owner, "1")]) == [Submission((own_id,), replayed=True)]
        refused = Submission((), replayed=True)
        assert await queue.submit_many([asked(owner, "2"), asked(owner, "1", 2)]) == [refused, refused]
    other = PromptRequest([b"b"], [0], "new", "alice", "3")
    assert await queue.submit_many([other, asked("alice", "2")], all_or_none=True) == [
        Submission((), replayed=False), refused
    ]  # fmt: skip
    assert (await queue.stat()).pending_prompts == 2
