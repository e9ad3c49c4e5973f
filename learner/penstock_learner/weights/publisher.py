"""The weight publisher stages versions as buckets and pushes them to the members of the weight group.

`push` tries until every member has the version or has left. An attempt has a fixed set of members:

    open ──► announce ──all ready──► send, bucket by bucket ──► hash, verify and commit
                 │                          │
                 └───── a member failed ────┴──► abort: no member has committed, and the push starts again without it

No member or publisher enters a collective before every member has answered the announcement. Every call and every
collective has a deadline. Sending, hashing and the commit share one: each gets what is left of it.
"""

from __future__ import annotations

import asyncio
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import grpc
import torch

from penstock.config.run import RunConfig
from penstock.errors import TrainingDiverged, WeightPushFailed
from penstock.internal_calls import ClusterKey, InternalChannels
from penstock.machine import raise_file_limit
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights import cuda
from penstock.weights.transports import (
    Deadline,
    TensorShape,
    build_manifest,
    has_cupy,
    host_id,
    weights_digest,
    wire_sizes,
)
from penstock_learner.model.torch_settings import DTYPES
from penstock_learner.weights.deltas import delta_shipment
from penstock_learner.weights.senders import (
    PublisherPlace,
    PushReport,
    PushTarget,
    Sender,
    Shipment,
    SnapshotSender,
    choose_transport,
    make_sender,
    num_ranks,
    why_unable,
    write_snapshot_folder,
)
from penstock_learner.weights.staging import MemoryKind, MemoryPool, StagedVersion, checksum_name, device_uuid

logger = logging.getLogger(__name__)
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
NO_DELTA_TRANSPORTS = ("shm", "snapshot")
"""Transports that cannot send deltas, because members read the complete buckets from the publisher's memory or file."""


class WeightPublisher:
    """Holds the version that is being gathered, and the versions that are being pushed or were pushed last. The
    training thread calls `begin` and StagedVersion.put. Each lane has one thread that calls `push`, and lanes push at
    the same time. The caller of `begin` names the versions that lanes still need."""

    def __init__(self, config: RunConfig, host: str, device: torch.device | None = None) -> None:
        raise_file_limit()  # a push by gloo has two connections for each server
        self.config = config
        self.host = host
        self.device = device or torch.device("cpu")
        self.staged: dict[int, StagedVersion] = {}
        self.kept_snapshots: dict[int, Path] = {}
        self._begun = threading.Condition()
        """Notified when a version is added to `staged`."""
        self._leaving: list[StagedVersion] = []
        """Versions that nothing needed when the newest began, and whose buckets were still being hashed."""
        self._memory = MemoryPool(self.device)
        self._calls = MemberCalls(config)
        self._senders: dict[tuple[str, str], Sender] = {}
        """Senders by lane and transport."""
        self._layout: tuple[list[TensorShape], weights_pb2.WeightManifest] = ([], weights_pb2.WeightManifest())
        """The tensors of the last version, and its manifest without what is the version's own."""
        self._chosen = ("", "")
        self._delta_choices: dict[str, DeltaChoice] = {}
        """What `weights.delta: auto` has measured, by lane."""

    def begin(
        self,
        policy_version: int,
        term: int,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        *,
        keep: Sequence[int] = (),
        adapter_scale: float | None = None,
        exact: Collection[str] = (),
    ) -> StagedVersion:
        """Allocate the buckets of a new version. Drops all versions except those in `keep`. Tensors are sent in
        `model.dtype`, and the ones that `exact` names in float32."""
        weights = self.config.weights
        dtype = SAFETENSORS_NAMES[DTYPES[self.config.model.dtype]]
        tensors = [TensorShape(name, "F32" if name in exact else dtype, shape) for name, shape in shapes]
        manifest = self._manifest(policy_version, term, tensors)
        self._drop_all_but(keep)
        memory = self._memory.take(self._memory_kind, [bucket.num_bytes for bucket in manifest.buckets])
        manifest.checksum = checksum_name(memory)
        manifest.retain = weights.delta is not False
        if adapter_scale is not None:
            manifest.adapter.scale = adapter_scale
        staged = StagedVersion(manifest, memory)
        with self._begun:
            self.staged[policy_version] = staged
            self._begun.notify_all()
        return staged

    def _drop_all_but(self, keep: Sequence[int]) -> None:
        """Use the memory of the other versions again. If the buckets of one are still hashed, it keeps its memory until
        the next version begins, which waits for it."""
        self._deadline("hashing").wait_until(lambda: all(staged.is_idle for staged in self._leaving))
        dropped = [self.staged.pop(version) for version in self.staged.keys() - set(keep)]
        unneeded, self._leaving = [*self._leaving, *dropped], []
        for staged in unneeded:
            if staged.is_idle:
                self._memory.give_back(staged.memory)
            else:
                self._leaving.append(staged)

    def _manifest(self, policy_version: int, term: int, tensors: list[TensorShape]) -> weights_pb2.WeightManifest:
        """The manifest of a version. The layout is computed once: all versions have the same."""
        before, layout = self._layout
        if tensors != before:
            layout = build_manifest(self.config.run, 0, 0, tensors, self.config.weights.bucket_bytes)
            self._layout = (tensors, layout)
        manifest = weights_pb2.WeightManifest()
        manifest.CopyFrom(layout)
        manifest.policy_version, manifest.term = policy_version, term
        return manifest

    def push(
        self,
        policy_version: int,
        targets: Sequence[PushTarget],
        transport: str | None = None,
        base_version: int | None = None,
        lane: str = "push",
    ) -> PushReport:
        """Push a staged version to as many targets as can take it. Does not raise if members fail. A version that is
        not finite is pushed to no one. Only the first attempt may send a delta on `base_version`, which all targets
        serve: members apply a delta to the base itself, so after an attempt that failed they may not have it any
        more."""
        self._deadline("staging").wait_for(self._begun, lambda: policy_version in self.staged)
        staged = self.staged[policy_version]
        base = None if base_version is None else self.staged.get(base_version)
        choice = self._delta_choices.setdefault(lane, DeltaChoice())
        report, members = PushReport(policy_version), list(targets)
        try:
            while members:
                started = time.monotonic()
                report.transport = transport or self._transport(members)
                names = [member.server_id for member in members]
                tries_delta = base is not None and self._sends_delta(report.transport, names, choice)
                shipment = Shipment(staged.manifest, staged)
                if base is not None and tries_delta:
                    with report.timed("encode"):
                        shipment = delta_shipment(staged, base, self._deadline("encoding a delta"))
                base = None
                failed = {m.server_id: why for m in members if (why := why_unable(report.transport, m))}
                if not failed:
                    sender, timeout_s = self._sender(lane, report.transport), self.config.weights.push_timeout_s
                    try:
                        failed = attempt(shipment, members, sender, self._calls, timeout_s, report)
                    except BaseMissing:
                        continue
                if not failed:
                    choice.record(report.transport, names, time.monotonic() - started, tried_delta=tries_delta)
                report.failed |= failed
                if report.committed:
                    break
                members = [member for member in members if member.server_id not in failed]
                if self._is_superseded(policy_version):
                    report.superseded = [member.server_id for member in members]
                    break
            report.weights_digest = weights_digest(staged.checksums(self._deadline("hashing")))
        except TrainingDiverged:
            report.nonfinite = staged.nonfinite
        return report

    def write_snapshot(self, policy_version: int, folder: Path) -> None:
        """Write a version to a folder that engines and Hugging Face can load. Snapshot pushes then use the folder."""
        write_snapshot_folder(
            self.staged[policy_version], self.config.model.path, folder, self._deadline("writing a snapshot")
        )
        self.kept_snapshots[policy_version] = folder

    def _sends_delta(self, transport: str, members: Sequence[str], choice: DeltaChoice) -> bool:
        if self.config.weights.delta == "auto":
            return choice.takes_delta(transport, members)
        return bool(self.config.weights.delta) and transport not in NO_DELTA_TRANSPORTS

    def _is_superseded(self, policy_version: int) -> bool:
        versions = list(self.staged.items())  # the training thread adds to it
        return any(version > policy_version and staged.is_complete for version, staged in versions)

    def _transport(self, members: list[PushTarget]) -> str:
        """Return the configured transport, or the one that `auto` picks. A new choice is logged."""
        configured = self.config.weights.transport
        if configured != "auto":
            return configured
        device = device_uuid(self.device)
        nccl_version = "" if device == "cpu" else cuda.nccl_version()
        place = PublisherPlace(host_id(), device, self._memory_kind, has_cupy(), nccl_version)
        chosen = choose_transport(place, members)
        if chosen != self._chosen:
            logger.info("weights are sent by %s: %s", *chosen)
            self._chosen = chosen
        return chosen[0]

    def _sender(self, lane: str, transport: str) -> Sender:
        key = (lane, transport)
        if key not in self._senders:
            self._senders[key] = (
                SnapshotSender(self.config.folder / "pushes" / lane, self.kept_snapshots, self.config.model.path)
                if transport == "snapshot"
                else make_sender(transport, self.host, self.device, self.config.weights.gloo_group_size)
            )
        return self._senders[key]

    def _deadline(self, activity: str) -> Deadline:
        return Deadline(self.config.weights.push_timeout_s, activity)

    @property
    def _memory_kind(self) -> MemoryKind:
        """Where to stage buckets: as configured, else on the GPU if the transport can use it, else on the host, in
        shared memory if `shm` may be used."""
        weights = self.config.weights
        on_device = self.device.type == "cuda" and weights.transport in ("auto", "nccl", "cuda_ipc")
        if weights.staging == "device" or (weights.staging == "auto" and on_device):
            return "device"
        return "shared" if weights.transport in ("auto", "shm") else "host"


class BaseMissing(Exception):
    """A member does not have the base of the delta. No member has committed."""


def attempt(
    shipment: Shipment,
    members: Sequence[PushTarget],
    sender: Sender,
    calls: MemberCalls,
    timeout_s: float,
    report: PushReport,
) -> dict[str, str]:
    """Try once to bring a shipment to a fixed set of members. Returns the members that must leave, with the reason.
    `timeout_s` is the deadline from the first bucket to the last commit. The durations, and after a commit the results,
    are added to `report`. If a phase before the commit fails, or raises BaseMissing or TrainingDiverged (the version is
    not finite), no member has committed."""
    manifest, staged = shipment.manifest, shipment.staged

    def abort(targets: Sequence[PushTarget], reason: str) -> dict[str, str]:
        """Tell members to drop the stage. Returns members that do not answer: they may still read the buckets."""
        silent = calls.abort(
            targets, weights_pb2.AbortRequest(policy_version=manifest.policy_version, reason=reason, term=manifest.term)
        )
        if silent:
            staged.memory.is_reusable = False
        return silent

    try:
        with report.timed("announce"):
            rendezvous = sender.open(shipment, members, Deadline(timeout_s, "opening the transfer"))
            *ranks, _ = accumulate((len(member.devices) for member in members), initial=1)
            requests = [
                weights_pb2.AnnounceRequest(
                    manifest=manifest, transport=report.transport, rendezvous=rendezvous, rank=rank,
                    world_size=num_ranks(members), deadline_s=timeout_s,
                )
                for rank in ranks
            ]  # fmt: skip
            answers, failed = calls.announce(members, requests)
        needs_full = any(answer.needs_full for answer in answers.values())
        if failed or needs_full:
            # Members that failed get no abort, because the publisher would have to wait for them again. Such a member
            # may have staged the version nevertheless, and may read the buckets until its own deadline.
            sender.close(failed=True)
            if failed:
                staged.memory.is_reusable = False
            left = [member for member in members if member.server_id not in failed]
            abort(left, "the push starts again without a member that failed")
            if needs_full:
                raise BaseMissing
            return failed

        deadline = Deadline(timeout_s, "the push")
        try:
            with report.timed("transfer"):
                sender.send(shipment, members, deadline)
        except WeightPushFailed as error:
            # It is not known which member broke the transfer. Those that do not answer an abort count as failed. If all
            # answer, all leave the push, and are served as late joiners afterwards.
            sender.close(failed=True)
            staged.memory.is_reusable = False
            silent = abort(members, "the transfer broke")
            return silent or {member.server_id: f"transfer: {error}" for member in members}

        with report.timed("commit"):
            checksums = staged.checksums(deadline)
            deadline.check()  # if no time is left, no member is told to commit
            request = weights_pb2.CommitRequest(
                policy_version=manifest.policy_version,
                term=manifest.term,
                bucket_checksums=checksums,
                deadline_s=deadline.remaining_s,
            )
            responses, failed = calls.commit(members, request)
        report.committed = sorted(responses)
        workers = sum(len(member.devices) for member in members if member.server_id in responses)
        report.num_bytes = sum(wire_sizes(manifest)) * workers
        report.running_requests = sum(response.running_requests for response in responses.values())
        report.seconds["receive"] = max((response.receive_s for response in responses.values()), default=0.0)
        report.seconds["load"] = max((response.load_s for response in responses.values()), default=0.0)
        report.seconds["pause"] = max((response.paused_s for response in responses.values()), default=0.0)
        sender.close(failed=bool(failed))
        if failed:
            abort([member for member in members if member.server_id in failed], "it did not commit in time")
        return failed
    except (WeightPushFailed, TrainingDiverged) as error:
        sender.close(failed=True)
        abort(members, str(error))
        if isinstance(error, TrainingDiverged):
            raise
        return {member.server_id: str(error) for member in members}


MAX_MESSAGE_BYTES = 64 * 2**20
"""Large enough for the manifests of models with many thousand tensors."""
PING_MS, SILENCE_MS = 1000, 4000
"""A member that answers no ping, or no connection attempt, for SILENCE_MS is unreachable. Its calls fail then, however
long their deadline is. The member's network thread answers pings, so a busy member is not silent."""
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", SILENCE_MS),
    ("grpc.http2.ping_timeout_ms", SILENCE_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # The first is also the deadline of a connection attempt. The others let a member that is back be reached soon.
    ("grpc.min_reconnect_backoff_ms", SILENCE_MS),
    ("grpc.initial_reconnect_backoff_ms", PING_MS),
    ("grpc.max_reconnect_backoff_ms", PING_MS),
)
CLOSE_TIMEOUT_S = 10.0

_Answered = tuple[dict[str, Any], dict[str, str]]
"""The answers, and one line for each member that failed, by the server's id."""


class MemberCalls:
    """Keeps one channel per address. A failed call does not raise: its member gets one line that says what failed. Any
    thread may call, and several may at the same time. `close` ends the thread of the channels."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.weights
        self.key = ClusterKey.of(config)
        self._channels = InternalChannels(config.tls, CHANNEL_OPTIONS)
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
            asyncio.run_coroutine_threadsafe(self._channels.close(), loop).result(CLOSE_TIMEOUT_S)
            loop.call_soon_threadsafe(loop.stop)

    def _call_all(
        self, method: str, members: Sequence[PushTarget], requests: Sequence[Any], timeout_s: float
    ) -> _Answered:
        """Start all calls in the thread of the channels, and wait for each until its own deadline."""

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
        return weights_pb2_grpc.WeightMemberServiceStub(self._channels.to(member.address))

    def _open(self) -> asyncio.AbstractEventLoop:
        with self._opening:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_loop, args=(self._loop,), name="member-calls", daemon=True).start()
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()


# ── whether to send a delta ──

DELTA_TRANSPORTS = ("nccl", "gloo")
"""Transports by which `auto` sends deltas. The others copy inside one machine, or write a file for late servers too."""
NUM_REMEMBERED = 3
RETRY_AFTER = 50
"""After so many times the seconds of the slower kind, it is tried again. So trying costs 2 % of the time."""


@dataclass
class _Seconds:
    """The newest pushes by one transport to one set of members."""

    members: tuple[str, ...]
    of_delta: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    of_whole: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    since_other_s: float = 0.0
    """Seconds of all pushes since the slower kind was tried."""


class DeltaChoice:
    """Compares the seconds of pushes with a delta, from its encoding to the last commit, with those of whole buckets.
    The first push to a set of members is not counted, because connections are made in it. Then each kind is tried once,
    the delta first, and the faster one is used. The other is tried again from time to time, because the share of
    weights that a step changes is not constant. A delta that turned out larger than the buckets counts as a delta."""

    def __init__(self) -> None:
        self._seconds: dict[str, _Seconds] = {}

    def takes_delta(self, transport: str, members: Sequence[str]) -> bool:
        """Return whether the next push by this transport, to these members, should send a delta."""
        if transport not in DELTA_TRANSPORTS:
            return False
        seconds = self._seconds.get(transport)
        if seconds is None or seconds.members != tuple(members) or not seconds.of_delta:
            return True
        if not seconds.of_whole:
            return False
        delta_s, whole_s = statistics.median(seconds.of_delta), statistics.median(seconds.of_whole)
        is_retry_due = seconds.since_other_s >= RETRY_AFTER * max(delta_s, whole_s)
        return (delta_s <= whole_s) != is_retry_due

    def record(self, transport: str, members: Sequence[str], seconds_taken: float, *, tried_delta: bool) -> None:
        """Note how long a push took that every member committed."""
        seconds = self._seconds.get(transport)
        if seconds is None or seconds.members != tuple(members):
            self._seconds[transport] = _Seconds(tuple(members))
            return
        delta, whole = seconds.of_delta, seconds.of_whole
        mine, other = (delta, whole) if tried_delta else (whole, delta)
        mine.append(seconds_taken)
        is_slower = bool(other) and statistics.median(mine) > statistics.median(other)
        seconds.since_other_s = 0.0 if is_slower else seconds.since_other_s + seconds_taken
