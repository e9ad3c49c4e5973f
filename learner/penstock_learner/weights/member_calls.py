"""gRPC calls to the members of a push. Each call goes to all members at once and has a deadline.

All channels share one event loop in one thread. gRPC's blocking channels start a thread each while a call runs: with
1,000 members that is 1,000 threads, twice a push, and twice the CPU time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import grpc

from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock_learner.weights.push import PushTarget

MAX_MESSAGE_BYTES = 64 * 2**20
"""Large enough for the manifests of models with many thousand tensors."""
PING_MS, SILENCE_MS = 1000, 4000
"""A member that answers no ping, or no connection attempt, for SILENCE_MS is unreachable. Its calls fail then, however
long their deadline is. The member's network thread answers pings, so a busy member is not silent."""
CLOSE_TIMEOUT_S = 10.0

_Answered = tuple[dict[str, Any], dict[str, str]]
"""The answers, and one line for each member that failed, by the server's id."""


class MemberCalls:
    """Keeps one channel per address. A failed call does not raise: its member gets one line that says what failed.

    Any thread may call, and several may at the same time. `close` ends the thread of the channels."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.weights
        self.key = ClusterKey.of(config)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._opening = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def announce(
        self, members: Sequence[PushTarget], requests: Sequence[weights_pb2.AnnounceRequest]
    ) -> tuple[dict[str, weights_pb2.AnnounceResponse], dict[str, str]]:
        return self._call_all("Announce", members, requests, self.config.ready_timeout_s)

    def commit(
        self, members: Sequence[PushTarget], request: weights_pb2.CommitRequest
    ) -> tuple[dict[str, weights_pb2.CommitResponse], dict[str, str]]:
        return self._call_all("Commit", members, [request] * len(members), request.deadline_s)

    def abort(self, members: Sequence[PushTarget], request: weights_pb2.AbortRequest) -> dict[str, str]:
        """Return the members that did not answer."""
        return self._call_all("Abort", members, [request] * len(members), self.config.ready_timeout_s)[1]

    def close(self) -> None:
        """Close the channels. A later call opens them again."""
        with self._opening:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._close_channels(), loop).result(CLOSE_TIMEOUT_S)
            loop.call_soon_threadsafe(loop.stop)

    def _call_all(
        self, method: str, members: Sequence[PushTarget], requests: Sequence[Any], timeout_s: float
    ) -> _Answered:
        """Start all calls in the thread of the channels, and wait for each. They end at their own deadline, so no wait
        is longer."""

        async def call_all() -> _Answered:
            metadata = self.key.metadata()
            calls = [
                getattr(self._stub(member), method)(request, timeout=timeout_s, metadata=metadata)
                for member, request in zip(members, requests, strict=True)
            ]
            answers: dict[str, Any] = {}
            failures: dict[str, str] = {}
            for member, call in zip(members, calls, strict=True):
                try:
                    answers[member.server_id] = await call
                except grpc.aio.AioRpcError as error:
                    failures[member.server_id] = f"{method.lower()}: {error.code().name}: {error.details()}"
            return answers, failures

        return asyncio.run_coroutine_threadsafe(call_all(), self._open()).result()

    def _stub(self, member: PushTarget) -> Any:
        if member.address not in self._channels:
            self._channels[member.address] = grpc.aio.insecure_channel(member.address, options=_channel_options())
        return weights_pb2_grpc.WeightMemberServiceStub(self._channels[member.address])

    def _open(self) -> asyncio.AbstractEventLoop:
        with self._opening:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="member-calls", daemon=True).start()
            return self._loop

    async def _close_channels(self) -> None:
        channels, self._channels = self._channels, {}
        await asyncio.gather(*(channel.close() for channel in channels.values()))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


def _channel_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", PING_MS),
        ("grpc.keepalive_timeout_ms", SILENCE_MS),
        ("grpc.http2.ping_timeout_ms", SILENCE_MS),
        ("grpc.http2.max_pings_without_data", 0),
        # The first is also the deadline of a connection attempt. The others let a member that is back be reached soon.
        ("grpc.min_reconnect_backoff_ms", SILENCE_MS),
        ("grpc.initial_reconnect_backoff_ms", PING_MS),
        ("grpc.max_reconnect_backoff_ms", PING_MS),
    ]
