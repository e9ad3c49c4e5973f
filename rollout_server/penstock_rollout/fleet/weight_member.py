"""The gRPC service through which a rollout server takes part in weight pushes, and the listener of the internal port,
where the learner and the gateway call. Every call must carry the cluster key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from penstock.errors import ConfigError, PenstockError, Unavailable, WeightPushFailed
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights.cluster_key import ClusterKey
from penstock.weights.cuda import libraries
from penstock.weights.cuda.nccl_group import NcclMeeting
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics

MAX_MESSAGE_BYTES = 64 * 2**20
"""Large enough for the manifests of models with many thousand tensors."""
WINDOW_BYTES = 2**20
"""What a caller may send before the server has read it. So manifests do not wait for round trips."""


def make_listener(key: ClusterKey) -> grpc.aio.Server:
    """Return a gRPC server that checks the key of each call before it parses the call's message."""
    return grpc.aio.server(
        interceptors=[_KeyCheck(key)],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.http2.max_ping_strikes", 0),  # the learner pings often to notice a server that is unreachable
            # gRPC would find the window by a ping with almost every call, which its callers answer: with 1,000
            # servers that costs the gateway a tenth of a generate call.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ],
    )


class _KeyCheck(grpc.aio.ServerInterceptor):
    def __init__(self, key: ClusterKey) -> None:
        self.key = key

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        try:
            has_key = self.key.is_in(handler_call_details.invocation_metadata or ())
        except ConfigError as error:
            return _refusal(grpc.StatusCode.UNAVAILABLE, str(error))
        if has_key:
            return await continuation(handler_call_details)
        return _refusal(
            grpc.StatusCode.UNAUTHENTICATED,
            "wrong or missing cluster key; set weights.cluster_key_file to the same key in every process",
        )


def _refusal(code: grpc.StatusCode, details: str) -> Any:
    """A handler that refuses a call of any kind. It has no deserializer, so the message stays unparsed."""

    async def refuse(_: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, details)

    return grpc.unary_unary_rpc_method_handler(refuse)


logger = logging.getLogger(__name__)
TERM_TIMEOUT_S = 2.0
MAX_DEADLINE_S = 86400.0
"""A push that takes longer than a day is a mistake."""
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class WeightMember(weights_pb2_grpc.WeightMemberServiceServicer):
    """Stages the announced version and loads it on commit. Refuses every publisher but the one of the current term.

    Only the registry decides which term is current: nothing that a call says is remembered. The listener has checked
    the cluster key before a call gets here."""

    run: str
    engine: Engine
    metrics: RolloutMetrics
    read_term: Callable[[], Awaitable[int]]
    """Reads the current term from the registry."""
    term: int = 0
    """The last term that the registry returned."""
    announced_version: int | None = None
    _receiving_until: float = 0.0
    _push_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_receiving(self) -> bool:
        """Whether a push is in progress. If its publisher died, the push counts as over at its deadline."""
        return time.monotonic() < self._receiving_until

    async def wait_for_push(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.is_receiving and time.monotonic() < deadline:
            # The end of the push is read again after each wait: a commit gives the push a new one.
            left_s = min(deadline, self._receiving_until) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._push_ended.wait(), max(0.0, left_s))

    def _begin_push(self, deadline_s: float) -> None:
        self._receiving_until = time.monotonic() + deadline_s
        self._push_ended.clear()

    def _end_push(self) -> None:
        self._receiving_until = 0.0
        self._push_ended.set()

    async def Announce(  # noqa: N802
        self, request: weights_pb2.AnnounceRequest, context: Context
    ) -> weights_pb2.AnnounceResponse:
        manifest = request.manifest
        await self._check_caller(manifest.run, manifest.term, context)
        await _check_deadline(request.deadline_s, context)
        if manifest.HasField("base_version") and manifest.base_version != self.engine.retained_version:
            return weights_pb2.AnnounceResponse(serving_version=self.engine.policy_version, needs_full=True)
        self.announced_version = manifest.policy_version
        self._begin_push(request.deadline_s)
        try:
            if request.transport == "nccl":
                NcclMeeting.from_json(request.rendezvous).check_version(libraries.nccl_version())
            await self.engine.stage_weights(request)
        except Exception as error:
            self._end_push()
            if isinstance(error, PenstockError):
                await context.abort(grpc.StatusCode.ABORTED, str(error))
            raise
        return weights_pb2.AnnounceResponse(serving_version=self.engine.policy_version)

    async def Commit(  # noqa: N802
        self, request: weights_pb2.CommitRequest, context: Context
    ) -> weights_pb2.CommitResponse:
        await self._check_caller(self.run, request.term, context)
        await _check_deadline(request.deadline_s, context)
        if request.policy_version != self.announced_version:  # a late call must not end the push of a newer version
            announced = "none" if self.announced_version is None else self.announced_version
            await context.abort(
                grpc.StatusCode.ABORTED, f"version {request.policy_version} is not announced; {announced} is"
            )
        self._begin_push(request.deadline_s)
        try:
            report = await self.engine.commit_weights(
                request.policy_version, list(request.bucket_checksums), request.deadline_s
            )
        except WeightPushFailed as error:
            logger.warning("version %d was not loaded: %s", request.policy_version, error)
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        finally:
            self._end_push()
        self.metrics.paused.labels("weights").inc(report.paused_s)
        self.metrics.version.labels("rollout").set(request.policy_version)
        logger.info("serving version %d, digest %s", request.policy_version, self.engine.weights_digest)
        return weights_pb2.CommitResponse(
            policy_version=self.engine.policy_version,
            paused_s=report.paused_s,
            running_requests=report.running_requests,
            receive_s=report.receive_s,
            load_s=report.load_s,
        )

    async def Abort(  # noqa: N802
        self, request: weights_pb2.AbortRequest, context: Context
    ) -> weights_pb2.AbortResponse:
        await self._check_caller(self.run, request.term, context)
        if request.policy_version == self.announced_version:
            logger.info("the push of version %d was aborted: %s", request.policy_version, request.reason)
            self._end_push()
            await self.engine.abort_weights()
        return weights_pb2.AbortResponse()

    async def _check_caller(self, run: str, term: int, context: Context) -> None:
        """Abort the call unless it names this run and the registry's term."""
        if run != self.run:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this server belongs to run {self.run!r}, not {run!r}")
        await self._refresh_term()
        if term != self.term:
            what = "has passed" if term < self.term else "was never taken"
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"term {term} {what}; the current one is {self.term}"
            )

    async def _refresh_term(self) -> None:
        """Read the registry's term. If the registry does not answer, the last term that it returned stays current: no
        learner can take a new one meanwhile."""
        try:
            async with asyncio.timeout(TERM_TIMEOUT_S):
                self.term = await self.read_term()
        except (Unavailable, TimeoutError) as error:
            logger.warning("cannot read the current term: %s", error)


async def _check_deadline(deadline_s: float, context: Context) -> None:
    """Abort the call unless its deadline is a time that passes."""
    if not 0 < deadline_s <= MAX_DEADLINE_S:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"deadline_s must be above 0 and at most {MAX_DEADLINE_S:g}, not {deadline_s}",
        )
