"""Rows of other servers, for the samples of a group that has more of them than its own server has rows
(`rollout.spread_groups`).

The server that leased the prompt keeps the group: its lease, its reward and its append are as ever, and the other
servers, its peers, store nothing. A peer gets one call of the internal port for each sample, and answers when the
sample is finished. The sample then carries the peer's id.

| a sample goes to a peer only if | because |
|---|---|
| the group has more samples than this server has rows | two servers are no faster with a group that fits into one |
| the peer serves the same version, and had a free row when it last reported | its rows are idle, and its weights ours |
| the peer is neither drained nor in quarantine | it must sample nothing for training |
| it is a response of the single-turn agent, without stop texts, from its first token on | the peer keeps no state |
| the run does not replay experts | the answer has none |

If a peer does not answer, ends the sample early or serves another version by then, the sample is generated here, from
its start, and the peer is left alone for RETRY_S. What it had sampled is lost with it, since only finished samples
come back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, zip_longest
from typing import Any, Protocol, cast

import grpc
import numpy as np

from penstock.codec import FINISH_FROM_PROTO, sampling_to_proto
from penstock.errors import PenstockError, Unavailable
from penstock.store.fleet import SERVING_STATES, ServerRecord
from penstock.trajectory import VersionSegment
from penstock.v1 import generate_pb2, generate_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock_rollout.agents.context import AgentContext
from penstock_rollout.engines.engine import Engine, GenerateRequest, TokenChunk
from penstock_rollout.metrics import RolloutMetrics

logger = logging.getLogger(__name__)
CONNECT_S = 5.0
RETRY_S = 60.0
"""How long a peer that failed is asked for nothing."""
FRESH_S = 5.0
"""Age of a report to the fleet from which a server counts as silent."""
_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 10_000),  # a peer that hangs is noticed within 20 s
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
]


class PeerList(Protocol):
    """The part of `penstock.store.fleet.Fleet` that is read here."""

    async def peers(self, server_id: str) -> list[ServerRecord]: ...


class PeerRows:
    """Finds free rows at peers and samples there. It keeps channels to the peers open until `close`."""

    def __init__(
        self, run: str, server_id: str, fleet: PeerList, key: ClusterKey, metrics: RolloutMetrics, num_rows: int,
        timeout_s: float,
    ) -> None:  # fmt: skip
        self.run = run
        self.server_id = server_id
        self.fleet = fleet
        self.key = key
        self.metrics = metrics
        self.num_rows = num_rows
        """Rows of every server of the run."""
        self.timeout_s = timeout_s
        """Longest time that a sample takes."""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._failed_at: dict[str, float] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def spread(self, contexts: Sequence[AgentContext]) -> list[AgentContext]:
        """The contexts of a group, of which those beyond this server's rows use free rows of peers, if there are some.

        The caller has made sure that the agent samples one response."""
        if len(contexts) <= self.num_rows or contexts[0].sampling.stop:
            return list(contexts)
        engine = contexts[0].engine
        try:
            peers = await self._free_rows(engine.policy_version)
        except Unavailable as error:
            logger.warning("cannot look for free rows of other servers: %s", error)
            return list(contexts)
        spread = list(contexts)
        unbegun = [
            index
            for index, context in enumerate(contexts)
            if context.progress is None or context.progress.saved is None
        ]
        beyond = [index for index in unbegun if index >= self.num_rows]
        for index, peer in zip(beyond, peers, strict=False):
            row = PeerRow(self, peer, engine, engine.policy_version)
            spread[index] = replace(contexts[index], engine=cast(Engine, row))
        return spread

    async def _free_rows(self, policy_version: int) -> list[ServerRecord]:
        """A peer for each free row, of one peer after the other in turn."""
        now = time.monotonic()
        rows = [
            [peer] * (self.num_rows - peer.running_requests - peer.waiting_requests)
            for peer in await self.fleet.peers(self.server_id)
            if peer.state in SERVING_STATES
            and peer.policy_version == policy_version
            and peer.heartbeat_age_ms < 1000 * FRESH_S
            and now - self._failed_at.get(peer.address, -RETRY_S) >= RETRY_S
        ]
        return [peer for peer in chain.from_iterable(zip_longest(*rows)) if peer is not None]

    async def sample(self, peer: ServerRecord, request: GenerateRequest, policy_version: int) -> TokenChunk | None:
        """The whole response, from the peer. None if it has none for us, whatever the reason."""
        chunk, why = None, ""
        try:
            chunk = await self._call(peer, request, policy_version)
        except grpc.aio.AioRpcError as error:
            why = error.details() or str(error.code())
            if error.code() != grpc.StatusCode.FAILED_PRECONDITION:  # it has the next version already
                self._failed_at[peer.address] = time.monotonic()
        except (TimeoutError, PenstockError) as error:
            why = str(error) or f"no connection within {CONNECT_S:g} s"
            self._failed_at[peer.address] = time.monotonic()
        if chunk is None:
            logger.warning("%s does not sample %s, so it is sampled here: %s", peer.server_id, request.request_id, why)
        self.metrics.peer_samples.labels("failed" if chunk is None else "answered").inc()
        return chunk

    async def _call(self, peer: ServerRecord, request: GenerateRequest, policy_version: int) -> TokenChunk:
        if peer.address not in self._channels:
            self._channels[peer.address] = grpc.aio.insecure_channel(peer.address, options=_OPTIONS)
        channel = self._channels[peer.address]
        async with asyncio.timeout(CONNECT_S):
            await channel.channel_ready()
        stub: Any = generate_pb2_grpc.GenerateServiceStub(channel)
        wanted = generate_pb2.GenerateRequest(
            run=self.run,
            token_ids=np.asarray(request.prompt_token_ids, dtype="<i4").tobytes(),
            sampling=sampling_to_proto(request.sampling),
            policy_version=policy_version,
        )
        metadata = await asyncio.to_thread(self.key.metadata)
        call = stub.Generate(wanted, timeout=self.timeout_s, metadata=metadata)
        try:
            answers = [answer async for answer in call]
        finally:
            call.cancel()
        return _chunk(answers)


def _chunk(answers: Sequence[generate_pb2.GenerateChunk]) -> TokenChunk:
    """The answer of a peer. Raises Unavailable if it is not one whole sample."""
    if len(answers) != 1:
        raise Unavailable(f"the answer has {len(answers)} parts")
    [answer] = answers
    token_ids = np.frombuffer(answer.token_ids, dtype="<i4").tolist()
    log_probs = np.frombuffer(answer.log_probs, dtype="<f4").tolist()
    segments = tuple(VersionSegment(s.start, s.end, s.policy_version) for s in answer.segments)
    reason = FINISH_FROM_PROTO.get(answer.finish_reason)
    if reason not in ("stop", "length") or not token_ids or len(token_ids) != len(log_probs):
        raise Unavailable(f"it ended the sample early, after {len(token_ids)} tokens")
    return TokenChunk(tuple(token_ids), tuple(log_probs), segments, reason)


class PeerRow:
    """The engine of one sample: a row at a peer, or else the engine of this server."""

    def __init__(self, rows: PeerRows, peer: ServerRecord, here: Engine, policy_version: int) -> None:
        self.rows = rows
        self.peer = peer
        self.here = here
        self.policy_version = policy_version
        self.sampled_by = ""
        """The peer, once it has sampled the response."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        """The whole response as one chunk if the peer sampled it. It never has tokens of both servers."""
        chunk = await self.rows.sample(self.peer, request, self.policy_version)
        if chunk is not None:
            self.sampled_by = self.peer.server_id
            yield chunk
            return
        # The protocol says AsyncIterator, but every engine returns a generator. Closing it aborts the request.
        async with aclosing(cast(Any, self.here.generate(request))) as chunks:
            async for own in chunks:
                yield own
