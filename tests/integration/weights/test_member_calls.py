"""Calls to many members at once: one thread serves all channels, and a failed member does not fail the others."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.config.run import ModelConfig, RunConfig, WeightsConfig
from penstock.internal_calls import ClusterKey
from penstock.machine import free_port
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock_learner.weights.publisher import MemberCalls
from penstock_learner.weights.senders import PushTarget

NUM_MEMBERS = 30


class Members(weights_pb2_grpc.WeightMemberServiceServicer):
    """Answers an announcement when all members have theirs, and counts the threads that run then."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.num_arrived = 0
        self.all_arrived = asyncio.Event()
        self.num_threads = 0

    async def Announce(self, request: weights_pb2.AnnounceRequest, context: Any) -> weights_pb2.AnnounceResponse:  # noqa: N802
        self.num_arrived += 1
        if self.num_arrived == self.count:
            self.num_threads = threading.active_count()
            self.all_arrived.set()
        await asyncio.wait_for(self.all_arrived.wait(), 60)
        return weights_pb2.AnnounceResponse(serving_version=request.rank)

    async def Commit(self, request: weights_pb2.CommitRequest, context: Any) -> weights_pb2.CommitResponse:  # noqa: N802
        if request.policy_version == 13:
            await context.abort(grpc.StatusCode.ABORTED, "13 is unlucky")
        return weights_pb2.CommitResponse()


@contextlib.asynccontextmanager
async def listening(members: Members) -> AsyncIterator[list[PushTarget]]:
    """Each member has a listener of its own, as every rollout server has."""
    listeners: list[grpc.aio.Server] = []
    targets: list[PushTarget] = []
    for number in range(members.count):
        listener = grpc.aio.server()
        weights_pb2_grpc.add_WeightMemberServiceServicer_to_server(members, listener)
        address = f"127.0.0.1:{listener.add_insecure_port('127.0.0.1:0')}"
        await listener.start()
        listeners.append(listener)
        targets.append(target(number, address))
    try:
        yield targets
    finally:
        for listener in listeners:
            await listener.stop(0)


def target(number: int, address: str) -> PushTarget:
    return PushTarget(f"server-{number}", address, ("cpu",), "", ("gloo",), "")


def announcements(targets: Sequence[PushTarget]) -> list[weights_pb2.AnnounceRequest]:
    return [weights_pb2.AnnounceRequest(rank=rank) for rank, _ in enumerate(targets)]


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[MemberCalls]:
    config = RunConfig(
        run="calls", run_dir=tmp_path, model=ModelConfig(path=tmp_path), weights=WeightsConfig(ready_timeout_s=60)
    )
    config.folder.mkdir(parents=True)
    ClusterKey.of(config).make_if_missing()
    made = MemberCalls(config)
    yield made
    made.close()


async def test_calls_to_many_members_share_one_thread(calls: MemberCalls) -> None:
    members = Members(NUM_MEMBERS)
    async with listening(members) as targets:
        before = threading.active_count()
        answers, failed = await asyncio.to_thread(calls.announce, targets, announcements(targets))
    assert not failed
    assert {name: answer.serving_version for name, answer in answers.items()} == {
        each.server_id: rank for rank, each in enumerate(targets)
    }
    # one thread that waits here, that of the channels, and gRPC's own
    assert members.num_threads - before < NUM_MEMBERS / 3


async def test_a_member_that_is_gone_or_refuses_gets_a_line_and_the_others_an_answer(calls: MemberCalls) -> None:
    members = Members(2)
    async with listening(members) as targets:
        gone = target(9, f"127.0.0.1:{free_port()}")
        answers, failed = await asyncio.to_thread(calls.announce, [gone, *targets], announcements([gone, *targets]))
        assert sorted(answers) == ["server-0", "server-1"]
        assert list(failed) == ["server-9"]
        assert failed["server-9"].startswith("announce: UNAVAILABLE: ")
        commit = weights_pb2.CommitRequest(policy_version=13, deadline_s=60)
        answers, failed = await asyncio.to_thread(calls.commit, targets[:1], commit)
    assert not answers
    assert failed == {"server-0": "commit: ABORTED: 13 is unlucky"}


async def test_two_lanes_call_at_the_same_time_and_after_a_close(calls: MemberCalls) -> None:
    """Each half of the members answers only once the other half was called too."""
    members = Members(4)
    async with listening(members) as targets:
        halves = targets[:2], targets[2:]
        outcomes = await asyncio.gather(
            *(asyncio.to_thread(calls.announce, half, announcements(half)) for half in halves)
        )
        assert [len(answers) for answers, _ in outcomes] == [2, 2]
        await asyncio.to_thread(calls.close)
        answers, _ = await asyncio.to_thread(calls.announce, targets, announcements(targets))
    assert len(answers) == 4
