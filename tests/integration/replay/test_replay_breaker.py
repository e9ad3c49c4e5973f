"""The circuit breaker: a burst of failures pauses leasing and costs no prompt its attempts."""

from __future__ import annotations

import asyncio

import pytest

from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import Lease
from penstock.store.fleet import Fleet, PolicyRegistry, RunControl, ServerRecord
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import MakeQueue, ReplayQueue, assert_conserved, finish, queue_maker, submit

__all__ = ["queue_maker"]
PROBE_S = 0.05
BREAKER = {"failures": 12, "non_finite_failures": 6, "probe_s": PROBE_S}
SLOW = BREAKER | {"probe_s": 600}


async def fail(queue: ReplayQueue, leases: list[Lease], reason: str, server: str = "s", running: int = 0) -> bool:
    """Fail these leases. Returns whether one of the failures opened the breaker."""
    return any([await queue.give_back(server, lease, reason, num_running=running) for lease in leases])


async def fail_until_open(queue: ReplayQueue, reason: str, server: str = "s") -> int:
    """Lease four prompts at a time and fail them. Returns the number of failures."""
    num_failures = 0
    for _ in range(100):
        leases = await queue.lease(server, 4)
        for lease in leases:
            num_failures += 1
            if await queue.give_back(server, lease, reason, num_running=3):
                await give_back_others(queue, [other for other in leases if other != lease], server)
                return num_failures
    raise AssertionError("the breaker never opened")


async def give_back_others(queue: ReplayQueue, leases: list[Lease], server: str) -> None:
    """What is still leased when the breaker opens fails too."""
    for lease in leases:
        await queue.give_back(server, lease, "non_finite")


async def lease_soon(queue: ReplayQueue, count: int, server: str = "s") -> list[Lease]:
    async with asyncio.timeout(100):
        while not (leases := await queue.lease(server, count)):
            await asyncio.sleep(PROBE_S / 5)
        return leases


@pytest.mark.parametrize(("reason", "limit"), [("non_finite", 6), ("reward_failed", 12)])
async def test_a_burst_pauses_leasing_and_costs_no_attempt(make_queue: MakeQueue, reason: str, limit: int) -> None:
    """Every prompt fails at every attempt, far more often than max_attempts, and none is dead-lettered."""
    queue = make_queue(groups_per_step=4, max_attempts=2, breaker=SLOW)
    await submit(queue, 8)
    assert await fail_until_open(queue, reason) == limit
    assert await queue.lease("s", 4) == [], "a server with an open breaker leases nothing"
    stat = await queue.stat()
    assert (stat.dead_lettered, stat.pending_prompts) == (0, 8)
    await assert_conserved(queue)

    leases = await queue.lease("healthy", 4)
    assert len(leases) == 4, "the breaker is the server's own"
    assert not await fail(queue, leases, "engine_error", "healthy", running=64)
    assert (await queue.stat()).dead_lettered == 0, "the failures of the burst were taken back"


@pytest.mark.parametrize("places", [1, 4])
async def test_no_server_and_no_restart_costs_an_attempt_while_everything_fails(
    make_queue: MakeQueue, places: int
) -> None:
    """Servers join one after the other, or one is restarted under new names. Each tries until its breaker opens."""
    queue = make_queue(groups_per_step=4, max_attempts=2, breaker=SLOW)
    await submit(queue, 8)
    for server in map(str, range(6)):
        while leases := await queue.lease(server, places):
            await fail(queue, leases, "non_finite", server, running=places - 1)
    stat = await queue.stat()
    assert (stat.dead_lettered, stat.pending_prompts) == (0, 8)
    await assert_conserved(queue)


@pytest.mark.parametrize("places", [1, 4, 12])
async def test_a_burst_buries_nothing_where_prompts_have_one_attempt(make_queue: MakeQueue, places: int) -> None:
    queue = make_queue(groups_per_step=16, max_attempts=1, breaker=SLOW)
    await submit(queue, 16)
    for server in ("a", "b"):
        while leases := await queue.lease(server, places):
            for number, lease in enumerate(leases, start=1):
                await queue.give_back(server, lease, "non_finite", num_running=places - number)
    stat = await queue.stat()
    assert (stat.dead_lettered, stat.pending_prompts) == (0, 16)
    await assert_conserved(queue)


async def test_servers_that_fail_at_the_same_time_bury_nothing(make_queue: MakeQueue) -> None:
    """A prompt that failed goes to the front of the line, so every server tries the same ones first."""
    queue = make_queue(groups_per_step=8, max_attempts=2, breaker=SLOW)
    await submit(queue, 8)
    servers = [f"s{number}" for number in range(6)]
    while leased := [(server, lease) for server in servers for lease in await queue.lease(server, 1)]:
        for server, lease in leased:
            await queue.give_back(server, lease, "non_finite")
    assert (await queue.stat()).dead_lettered == 0
    await assert_conserved(queue)


async def test_a_prompt_with_one_attempt_is_dead_lettered_when_its_server_succeeds(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, max_attempts=1, breaker=BREAKER)
    await submit(queue, 4)
    bad, good, *others = await queue.lease("s", 4)
    await fail(queue, [bad], "reward_failed", running=3)
    assert (await queue.stat()).dead_lettered == 0, "nobody knows yet whether the server is at fault"
    await finish(queue, [good])
    stat = await queue.stat()
    assert (stat.dead_lettered, stat.pending_prompts, stat.in_flight) == (1, 0, len(others))
    assert await queue.dead_letter_reasons() == {"reward_failed": 1}
    await assert_conserved(queue)


async def test_a_held_out_prompt_with_one_attempt_is_finished_when_its_server_succeeds(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, max_attempts=1, breaker=BREAKER)
    await queue.create_evaluation("held-out-1", [b"p"] * 2)
    bad, good = await queue.lease("s", 4)
    await fail(queue, [bad], "reward_failed", running=1)
    await queue.record_evaluation("held-out-1", good, [1.0], 0, 0)
    evaluation = await queue.get_evaluation("held-out-1")
    assert (evaluation.num_finished, evaluation.num_failed, evaluation.score) == (2, 1, 1.0)


async def test_probes_try_other_prompts_and_a_success_resumes(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, max_attempts=2, breaker=BREAKER)
    await submit(queue, 8)
    await fail_until_open(queue, "non_finite")
    probed = []
    for _ in range(3):
        leases = await lease_soon(queue, 4)
        assert len(leases) == 1, "a probe is one prompt"
        assert not await fail(queue, leases, "non_finite")
        probed.append(leases[0].prompt_id)
    assert len(set(probed)) == 3, "a bad prompt cannot keep the breaker open"
    await finish(queue, await lease_soon(queue, 4))
    assert len(await queue.lease("s", 4)) == 4
    assert (await queue.stat()).dead_lettered == 0
    await assert_conserved(queue)


async def test_a_new_version_is_probed_at_once(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, breaker=SLOW)
    await submit(queue, 8)
    await queue.take_term(0)
    await fail_until_open(queue, "non_finite")
    assert await queue.lease("s", 4) == []
    await queue.publish(1, 0, b"")
    probe = await queue.lease("s", 4)
    assert len(probe) == 1 and await queue.lease("s", 4) == []
    await finish(queue, probe)
    assert len(await queue.lease("s", 4)) == 4


async def test_a_few_bad_prompts_are_dead_lettered_and_pause_nothing(make_queue: MakeQueue) -> None:
    """Three of 64 prompts fail at once, again and again, before any other is finished."""
    queue = make_queue(groups_per_step=64, max_attempts=3, breaker=BREAKER)
    await submit(queue, 64)
    leases = await queue.lease("s", 64)
    for _ in range(3):
        bad, leases = leases[:3], leases[3:]
        assert not await fail(queue, bad, "non_finite", running=61)
        leases = [*await queue.lease("s", 3), *leases]
    assert (await queue.stat()).dead_lettered == 3
    await assert_conserved(queue)


async def test_one_bad_prompt_alone_is_dead_lettered(make_queue: MakeQueue) -> None:
    queue = make_queue(max_attempts=5, breaker={"failures": 2, "non_finite_failures": 1})
    await submit(queue, 1)
    for _ in range(5):
        assert not await fail(queue, await queue.lease("s", 1), "non_finite")
    assert (await queue.stat()).dead_lettered == 1


async def test_prompts_that_open_breaker_after_breaker_are_dead_lettered(make_queue: MakeQueue) -> None:
    """Four bad prompts block a server of four places. Other prompts succeed, so the bad ones are at fault."""
    queue = make_queue(groups_per_step=32, max_attempts=2, breaker=BREAKER)
    await submit(queue, 20)
    bad = {1, 2, 3, 4}
    async with asyncio.timeout(100):
        while (await queue.stat()).queued < 16:
            for lease in await queue.lease("s", 4):
                if lease.prompt_id in bad:
                    await queue.give_back("s", lease, "non_finite", num_running=3)
                else:
                    await finish(queue, [lease])
            await asyncio.sleep(PROBE_S / 10)
    assert (await queue.stat()).dead_lettered == len(bad)
    await assert_conserved(queue)


async def test_the_breaker_can_be_switched_off(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, max_attempts=2, breaker={"failures": 0, "non_finite_failures": 1})
    await submit(queue, 8)
    for _ in range(4):
        assert not await fail(queue, await queue.lease("s", 4), "non_finite")
    assert (await queue.stat()).dead_lettered == 8


async def test_failures_of_held_out_prompts_are_refunded_too(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, max_attempts=2, breaker=BREAKER)
    await queue.create_evaluation("held-out-1", [b"p"] * 4)
    await fail_until_open(queue, "non_finite")
    for lease in await lease_soon(queue, 4):
        await queue.record_evaluation("held-out-1", lease, [1.0], 0, 0)
    for lease in await queue.lease("s", 4):
        await queue.record_evaluation("held-out-1", lease, [1.0], 0, 0)
    evaluation = await queue.get_evaluation("held-out-1")
    assert (evaluation.num_finished, evaluation.num_samples) == (4, 4)


async def test_bad_held_out_prompts_do_not_stop_training(make_queue: MakeQueue) -> None:
    """After held-out prompts have failed, the probe is a training prompt."""
    queue = make_queue(groups_per_step=4, breaker=BREAKER)
    await queue.create_evaluation("held-out-1", [b"p"] * 20)
    await fail_until_open(queue, "reward_failed")
    [first, *_] = await submit(queue, 4)
    [probe] = await lease_soon(queue, 4)
    assert probe.prompt_id == first
    await queue.give_back("s", probe, "reward_failed")
    [probe] = await lease_soon(queue, 4)
    assert probe.prompt_id < first, "after a training prompt has failed, a held-out one is tried"


async def pin(queue: ReplayQueue, evaluation_id: str, *servers: str) -> None:
    """Pin servers, which report version 7, and an evaluation to this version."""
    if isinstance(queue, MemoryReplayQueue):
        queue.store.pins |= dict.fromkeys((evaluation_id, *servers), 7)
        queue.store.served_versions |= dict.fromkeys(servers, 7)
        return
    for server in servers:
        await Fleet(queue.client, "test").report(ServerRecord(server, "127.0.0.1:1", "torch", policy_version=7))
    for name in (evaluation_id, *servers):
        await PolicyRegistry(queue.client, "test").pin(name, 7)


@pytest.mark.parametrize("has_peer", [False, True])
async def test_a_pinned_evaluation_whose_prompts_all_fail_ends(make_queue: MakeQueue, has_peer: bool) -> None:
    """Its server answers nothing else, so no success can close the breaker."""
    queue = make_queue(groups_per_step=4, max_attempts=2, breaker=BREAKER)
    await submit(queue, 4)
    await queue.create_evaluation("held-out-1", [b"p"] * 8)
    await pin(queue, "held-out-1", "s", *(["peer"] if has_peer else []))
    [answered] = await queue.lease("s", 1)
    await queue.record_evaluation("held-out-1", answered, [0.5], 7, 7)
    await fail_until_open(queue, "reward_failed")
    await queue.take_term(0)
    await queue.publish(8, 0, b"")
    for number in range(3):
        assert (await queue.get_evaluation("held-out-1")).num_finished == 1, f"after {number} probes"
        await fail(queue, await lease_soon(queue, 4), "reward_failed")
    evaluation = await queue.get_evaluation("held-out-1")
    assert (await queue.stat()).pending_prompts == 4
    if has_peer:
        assert evaluation.num_finished == 1 and len(await queue.lease("peer", 8)) == 7, "the other server answers"
        return
    assert (evaluation.num_finished, evaluation.num_failed, evaluation.score) == (8, 7, 0.5)
    assert await queue.evaluation_scores() == {"held-out": 0.5}
    assert await queue.lease("s", 4) == []


async def test_an_operator_sees_and_closes_it(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=4, breaker=SLOW)
    if isinstance(queue, MemoryReplayQueue):
        return
    assert isinstance(queue, RedisReplayQueue)
    await submit(queue, 8)
    control = RunControl(queue.client, "test")
    assert await control.open_breakers() == []
    await fail(queue, await queue.lease("s", 1), "engine_error")
    assert await control.open_breakers() == [], "one failure opens nothing"
    await fail_until_open(queue, "non_finite")
    [breaker] = await control.open_breakers()
    assert (breaker.server_id, breaker.reason) == ("s", "non_finite")
    assert breaker.num_failures >= 6 and 0 < breaker.probe_in_s <= 600
    await control.resume()
    assert await control.open_breakers() == [] and len(await queue.lease("s", 4)) == 4
