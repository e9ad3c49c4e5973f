"""A rollout server's place in the fleet: its reports, its state, the version it has to serve, and the pushes to it.

States that the server itself changes (`penstock/store/fleet.py` has all of them):

    JOINING, EVICTED ──► STALE ──(serves the wanted version)──► READY
    READY, LOADING ──(held at another version, or behind the published one)──► STALE

The wanted version is the one that the run or this server is held at, or else the current one of the registry. A STALE
server gets it from the next push, or from a snapshot if the config allows it. A version is published after its push, so
a serving server that is behind was skipped: it was released from an older version, or became READY during the push.

`WeightMember` is the gRPC service through which the server takes part in pushes. `make_listener` makes the listener of
the internal port, where the learner and the gateway call: every call must carry the cluster key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from penstock.config.run import RunConfig
from penstock.errors import ConfigError, NotFound, PenstockError, Unavailable, WeightPushFailed
from penstock.internal_calls import ClusterKey
from penstock.logs import bind
from penstock.process_endpoint import Readiness
from penstock.store.fleet import SERVING_STATES, Fleet, PolicyRegistry, Reported, ServerRecord, ServerState
from penstock.v1 import policies_pb2, weights_pb2, weights_pb2_grpc
from penstock.weights import cuda
from penstock.weights.cuda import NcclMeeting
from penstock.weights.snapshot import read_published_manifest
from penstock.weights.transports import TRANSPORTS, has_cupy, host_id
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics

logger = logging.getLogger(__name__)
REPORT_S = 0.5


@dataclass(eq=False)
class FleetMembership:
    """Reports this server to the fleet and follows the state that the registry has for it.

    The server leases prompts only while `may_lease`."""

    config: RunConfig
    server_id: str
    engine: Engine
    fleet: Fleet
    policies: PolicyRegistry
    weight_member: WeightMember
    metrics: RolloutMetrics
    on_first_serving: Callable[[], Awaitable[None]] | None = None
    """Called once, when the server first serves the wanted version."""
    address: str = ""
    """host:port of the internal listener, known once it listens."""
    state: ServerState = "JOINING"
    held_version: int | None = None
    """The version that this server is held at, as of the last report."""
    _reported_at: float = 0.0
    _stopped_serving_at: float | None = None
    _refused_snapshot: str = ""
    """A snapshot that could not be loaded, and is not tried again."""

    async def join(self, address: str) -> None:
        self.address = address
        await self.fleet.join(self._record(0, 0))

    async def leave(self) -> None:
        await self.fleet.leave(self.server_id)
        logger.info("left the fleet")

    def may_lease(self) -> bool:
        """Whether this server is serving, according to a recent report. After a suspension it must report first."""
        return self._silence_s() < self.config.replay.lease_ttl_s and self.state in SERVING_STATES

    def readiness(self) -> Readiness | None:
        """Whether this server serves the wanted version; None before it has joined the fleet."""
        if not self.address:
            return None
        if not self._reported_at:
            return Readiness("stale", "it has joined the fleet and has not reported yet")
        if (silence_s := self._silence_s()) >= self.config.replay.lease_ttl_s:
            return Readiness("stale", f"it could not report to the fleet for {silence_s:.0f} s: Redis does not answer")
        if self.state not in SERVING_STATES:
            detail = f"it has version {self.engine.policy_version} and waits for the weights of the wanted one"
            return Readiness("stale", f"{self.state}: {detail}")
        return Readiness("ready", f"serves version {self.engine.policy_version}")

    def _silence_s(self) -> float:
        return time.monotonic() - self._reported_at

    async def report_loop(self, num_running: Callable[[], int], num_scoring: Callable[[], int] = lambda: 0) -> None:
        """Send heartbeats to the fleet, and act on the state that the registry returns."""
        while True:
            try:
                reported = await self.fleet.report(self._record(num_running(), num_scoring()))
                self._enter(await self._next_state(reported))
                if self.on_first_serving is not None and self.state in SERVING_STATES:
                    await self.on_first_serving()
                    self.on_first_serving = None
                bind(policy_version=self.engine.policy_version)
                self._reported_at = time.monotonic()
            except Unavailable as error:
                logger.warning("cannot report to the fleet: %s", error)
            await asyncio.sleep(REPORT_S)

    def _enter(self, state: ServerState) -> None:
        """Set the state, measure how long the server was not serving, and show the version. A push may load a version
        after its publisher has abandoned this server, so the version is the engine's."""
        self.metrics.version.labels("rollout").set(self.engine.policy_version)
        self.metrics.pinned.set(self.held_version is not None)
        if state in SERVING_STATES and self._stopped_serving_at is not None:
            self.metrics.recovery_seconds.labels("rollout").observe(time.monotonic() - self._stopped_serving_at)
            self._stopped_serving_at = None
        elif state not in SERVING_STATES and self.state in SERVING_STATES:
            self._stopped_serving_at = time.monotonic()
        self.state = state

    async def _next_state(self, reported: Reported) -> ServerState:
        """Make the state changes that the module's docstring draws. Returns the new state."""
        state = reported.state or "JOINING"
        was_held = self.held_version is not None
        self.held_version = held = reported.held_version
        if state in ("JOINING", "EVICTED") or (
            state in SERVING_STATES and self._serves_wrong_version(reported, was_held)
        ):
            state = await self._move("STALE")
        if state == "STALE":
            try:
                wanted = await self.policies.get(held)
            except NotFound:  # nothing was published yet: it is the model folder
                wanted = policies_pb2.Policy(policy_version=0)
            await self._load_wanted_snapshot(wanted, is_held=held is not None)
            if self.engine.policy_version == wanted.policy_version:
                state = await self._move("READY")
        return state

    def _serves_wrong_version(self, reported: Reported, was_held: bool) -> bool:
        """Whether a serving server is not at the version it is held at, was just released from another one than the
        published, or was skipped in the last push. It may be ahead of the published version: a push commits before
        its version is published."""
        if reported.held_version is not None:
            return self.engine.policy_version != reported.held_version
        if was_held:
            return self.engine.policy_version != reported.current_version
        return self.engine.policy_version < reported.current_version

    async def _load_wanted_snapshot(self, wanted: policies_pb2.Policy, is_held: bool) -> None:
        """Load the wanted version from its snapshot, if the config allows it or the server is held. The learner does
        not push held versions, so a held server can get them only from a snapshot."""
        weights = self.config.weights
        is_behind = self.engine.policy_version != wanted.policy_version
        may_load = is_held or weights.catch_up == "snapshot"
        if not may_load or not is_behind or wanted.snapshot_path in ("", self._refused_snapshot):
            return
        if self.weight_member.is_receiving:  # a newer version, whose stage the snapshot would replace
            return
        try:
            await load_snapshot(self.engine, wanted, weights.push_timeout_s)
        except WeightPushFailed as error:
            logger.warning("cannot load the snapshot of version %d: %s", wanted.policy_version, error)
            self._refused_snapshot = wanted.snapshot_path

    async def _move(self, state: ServerState) -> ServerState:
        logger.info("%s at version %d", state, self.engine.policy_version)
        await self.fleet.set_state(self.server_id, state)
        return state

    def _record(self, num_running: int, num_scoring: int) -> ServerRecord:
        load = self.engine.stats()
        return ServerRecord(
            server_id=self.server_id,
            address=self.address,
            engine=self.engine.name,
            policy_version=self.engine.policy_version,
            weights_digest=self.engine.weights_digest,
            devices=self.engine.devices,
            host_id=host_id(),
            transports=available_transports(self.engine.devices),
            nccl_version=reported_nccl_version(self.engine.devices),
            running_groups=num_running,
            scoring_groups=num_scoring,
            running_requests=load.running_requests,
            waiting_requests=load.waiting_requests,
            kv_cache_usage=load.kv_cache_usage,
            generating_s=load.generating_s,
        )


async def load_snapshot(engine: Engine, policy: policies_pb2.Policy, timeout_s: float) -> None:
    """Load a published version into the engine. Raises WeightPushFailed and changes nothing if the snapshot is missing
    or is not the one that was published."""
    folder = Path(policy.snapshot_path)
    snapshot = read_published_manifest(folder, policy.weights_digest)
    checksums = list(snapshot.bucket_checksums)
    if snapshot.manifest.policy_version != policy.policy_version:
        raise WeightPushFailed(f"{folder} is not the published version {policy.policy_version}")
    announcement = weights_pb2.AnnounceRequest(
        manifest=snapshot.manifest,
        transport="snapshot",
        rendezvous=str(folder),
        rank=1,
        world_size=2,
        deadline_s=timeout_s,
    )
    await engine.stage_weights(announcement)
    await engine.commit_weights(policy.policy_version, checksums, timeout_s)
    logger.info("loaded version %d from %s", policy.policy_version, folder)


def available_transports(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the transports for an engine whose workers keep their weights on `devices`."""
    names = {"gloo", "snapshot"}
    if host_id():
        names.add("shm")
    if "cpu" not in devices and has_cupy():
        names.add("cuda_ipc")
        if _nccl_version():
            names.add("nccl")
    return tuple(name for name in TRANSPORTS if name in names)


def reported_nccl_version(devices: Sequence[str]) -> str:
    """Return the version of NCCL if such an engine can receive by `nccl`, else an empty string."""
    return _nccl_version() if "nccl" in available_transports(devices) else ""


@cache
def _nccl_version() -> str:
    return cuda.nccl_version()


# ── weight pushes ──

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
                NcclMeeting.from_json(request.rendezvous).check_version(cuda.nccl_version())
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


# ── the listener of the internal port ──

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
