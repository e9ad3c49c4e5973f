"""gRPC calls to the members of a push. Each call goes to all members at once and has a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock_learner.weights.senders.sender import PushTarget

MAX_MESSAGE_BYTES = 64 * 2**20
"""Large enough for the manifests of models with many thousand tensors."""
PING_MS, SILENCE_MS = 1000, 4000
"""A member that answers no ping, or no connection attempt, for SILENCE_MS is unreachable. Its calls fail then, however
long their deadline is. The member's network thread answers pings, so a busy member is not silent."""


class MemberCalls:
    """Keeps one channel per address. A failed call does not raise: its member gets one line that says what failed."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.weights
        self.key = ClusterKey.of(config)
        self._channels: dict[str, grpc.Channel] = {}

    def announce(
        self, members: Sequence[PushTarget], requests: Sequence[weights_pb2.AnnounceRequest]
    ) -> tuple[dict[str, weights_pb2.AnnounceResponse], dict[str, str]]:
        return self._call_all(members, lambda stub: stub.Announce, requests, self.config.ready_timeout_s, "announce")

    def commit(
        self, members: Sequence[PushTarget], request: weights_pb2.CommitRequest
    ) -> tuple[dict[str, weights_pb2.CommitResponse], dict[str, str]]:
        requests = [request] * len(members)
        return self._call_all(members, lambda stub: stub.Commit, requests, request.deadline_s, "commit")

    def abort(self, members: Sequence[PushTarget], request: weights_pb2.AbortRequest) -> dict[str, str]:
        """Return the members that did not answer."""
        requests = [request] * len(members)
        return self._call_all(members, lambda stub: stub.Abort, requests, self.config.ready_timeout_s, "abort")[1]

    def _call_all(
        self,
        members: Sequence[PushTarget],
        method: Callable[[Any], Any],
        requests: Sequence[Any],
        timeout_s: float,
        phase: str,
    ) -> tuple[dict[str, Any], dict[str, str]]:
        metadata = self.key.metadata()
        futures = [
            method(self._stub(member)).future(request, timeout=timeout_s, metadata=metadata)
            for member, request in zip(members, requests, strict=True)
        ]
        answers: dict[str, Any] = {}
        failures: dict[str, str] = {}
        for member, future in zip(members, futures, strict=True):
            try:
                answers[member.server_id] = future.result()
            except grpc.RpcError as error:
                failures[member.server_id] = f"{phase}: {error.code().name}: {error.details()}"
        return answers, failures

    def _stub(self, member: PushTarget) -> weights_pb2_grpc.WeightMemberServiceStub:
        if member.address not in self._channels:
            self._channels[member.address] = grpc.insecure_channel(member.address, options=_channel_options())
        return weights_pb2_grpc.WeightMemberServiceStub(self._channels[member.address])


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
