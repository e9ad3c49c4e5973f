"""A server in quarantine leases its probes and nothing else, and a group that is expired costs its prompt nothing."""

from __future__ import annotations

import pytest

from penstock.errors import Fenced
from penstock.replay.queue import RedisReplayQueue
from penstock.store.fleet import Fleet, Quarantine, Quarantines, ServerRecord
from support.memory_queue import MemoryReplayQueue
from support.replay_backends import (
    MakeQueue,
    ReplayQueue,
    assert_conserved,
    finish,
    queue_maker,
    queue_of_backend,
    submit,
)

__all__ = ["queue_maker", "queue_of_backend"]


async def hold(queue: ReplayQueue, server: str, probes: int) -> None:
    """Put the server into quarantine with this many probes."""
    if isinstance(queue, MemoryReplayQueue):
        queue.store.quarantine(server, probes)
        return
    await Fleet(queue.client, "test").join(ServerRecord(server, "127.0.0.1:1", "torch"))
    record = Quarantine(server, 0.3, 0.1, policy_version=2, since_ms=17, probes_left=probes)
    await Quarantines(queue.client, "test").put(record, (await queue.stat()).term)


async def test_a_server_in_quarantine_leases_its_probes_and_no_evaluation(make_queue: MakeQueue) -> None:
    queue = make_queue(groups_per_step=8)
    await submit(queue, 12)
    await queue.create_evaluation("heldout", [b"question"])
    await hold(queue, "bad", 0)
    assert await queue.lease("bad", 4) == []
    await hold(queue, "bad", 3)
    probes = [lease for _ in range(3) for lease in await queue.lease("bad", 2)]
    assert [lease.payload for lease in probes] == [b"prompt 0", b"prompt 1", b"prompt 2"]
    assert [lease.payload for lease in await queue.lease("good", 3)] == [b"question", b"prompt 3", b"prompt 4"]
    await assert_conserved(queue)
    if isinstance(queue, RedisReplayQueue):
        [record] = (await Quarantines(queue.client, "test").read()).values()
        assert (record.probes_left, record.probe_ids) == (0, {lease.prompt_id for lease in probes})
        assert (record.mismatch_nats, record.limit_nats, record.since_ms) == (0.3, 0.1, 17)


async def test_an_expired_group_costs_its_prompt_no_attempt(make_queue: MakeQueue) -> None:
    queue = make_queue(max_attempts=1)
    await submit(queue, 1)
    await queue.take_term(0)
    for step in range(1, 5):
        await finish(queue, await queue.lease("bad", 1))
        [prompt_id] = await queue.take(1, 1)
        await queue.expire(prompt_id, "quarantined")
        assert await queue.expired_reasons() == {"quarantined": step}
    stat = await queue.stat()
    assert (stat.pending_prompts, stat.dead_lettered, stat.expired) == (1, 0, 4)
    await assert_conserved(queue)


async def test_only_the_current_learner_changes_a_quarantine(queue: RedisReplayQueue) -> None:
    if not isinstance(queue, RedisReplayQueue):
        pytest.skip("the records are in Redis")
    quarantines, fleet = Quarantines(queue.client, "test"), Fleet(queue.client, "test")
    term = await queue.take_term(0)
    record = Quarantine("s", 0.3, 0.1, policy_version=2, since_ms=1)
    await quarantines.put(record, term)
    assert await quarantines.read() == {}, "the server is not in the fleet"
    await fleet.join(ServerRecord("s", "127.0.0.1:1", "torch"))
    await quarantines.put(record, term)
    assert await quarantines.read() == {"s": record}
    await queue.take_term(0)
    for change in (quarantines.put(record, term), quarantines.end("s", term)):
        with pytest.raises(Fenced):
            await change
    assert await quarantines.read() == {"s": record}
    await fleet.leave("s")
    assert await quarantines.read() == {}
