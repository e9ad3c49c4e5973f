"""The weight publisher stages versions as buckets and pushes them to the members of the weight group.

`push` tries until every member has the version or has left. If a member fails before the commit, the push starts again
without it. push_attempt.py has the phases of one attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from penstock.config.run import RunConfig
from penstock.errors import TrainingDiverged
from penstock.machine.open_files import raise_file_limit
from penstock.v1 import weights_pb2
from penstock.weights.checksums import weights_digest
from penstock.weights.cuda import libraries
from penstock.weights.cuda.nccl_group import version_mismatch
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import TensorShape, build_manifest
from penstock.weights.transports import has_cupy, host_id
from penstock_learner.model.torch_settings import DTYPES
from penstock_learner.weights.delta_choice import DeltaChoice
from penstock_learner.weights.delta_shipment import delta_shipment
from penstock_learner.weights.device_memory import device_uuid
from penstock_learner.weights.member_calls import MemberCalls
from penstock_learner.weights.memory import MemoryKind
from penstock_learner.weights.memory_pool import MemoryPool
from penstock_learner.weights.push_attempt import AttemptOutcome, PushAttempt
from penstock_learner.weights.push_report import PushReport
from penstock_learner.weights.senders.factory import make_sender
from penstock_learner.weights.senders.sender import PushTarget, Sender, Shipment
from penstock_learner.weights.senders.snapshot import SnapshotSender
from penstock_learner.weights.senders.transport_choice import PublisherPlace, choose_transport
from penstock_learner.weights.snapshot_folder import write_snapshot_folder
from penstock_learner.weights.staging import StagedVersion, checksum_name

logger = logging.getLogger(__name__)
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
NO_DELTA_TRANSPORTS = ("shm", "snapshot")
"""Transports that cannot send deltas, because members read the complete buckets from the publisher's memory or file."""


class WeightPublisher:
    """Holds the version that is being gathered, and the versions that are being pushed or were pushed last.

    The training thread calls `begin` and StagedVersion.put. Each lane has one thread that calls `push`, and lanes push
    at the same time. The caller of `begin` names the versions that lanes still need."""

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
        """Versions that nobody needed when the newest began, and whose buckets were still being hashed."""
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
        """Allocate the buckets of a new version. Drops every other version except those in `keep`.

        Tensors are sent in `model.dtype`, and those that `exact` names in float32."""
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
        self._deadline("hashing").wait_until(lambda: all(staged.is_settled for staged in self._leaving))
        dropped = [self.staged.pop(version) for version in self.staged.keys() - set(keep)]
        unneeded, self._leaving = [*self._leaving, *dropped], []
        for staged in unneeded:
            if staged.is_settled:
                self._memory.give_back(staged.memory)
            else:
                self._leaving.append(staged)

    def _manifest(self, policy_version: int, term: int, tensors: list[TensorShape]) -> weights_pb2.WeightManifest:
        """The manifest of a version. The layout is computed once: it is that of the version before."""
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
        *,
        transport: str | None = None,
        base_version: int | None = None,
        lane: str = "push",
    ) -> PushReport:
        """Push a staged version to as many targets as can take it. Does not raise if members fail.

        A version that is not finite is pushed to nobody. `base_version` is the version that all targets serve. The push
        may send a delta on it."""
        self._deadline("staging").wait_for(self._begun, lambda: policy_version in self.staged)
        staged = self.staged[policy_version]
        report = PushReport(policy_version)
        try:
            self._push(staged, list(targets), transport, base_version, lane, report)
            report.weights_digest = weights_digest(staged.checksums(self._deadline("hashing")))
        except TrainingDiverged:
            report.nonfinite = staged.nonfinite
        return report

    def _push(
        self,
        staged: StagedVersion,
        members: list[PushTarget],
        transport: str | None,
        base_version: int | None,
        lane: str,
        report: PushReport,
    ) -> None:
        """Try until every member has the version or has left. Only the first attempt may send a delta: members apply it
        to the base itself, so after an attempt that failed they may not have the base any more."""
        base = None if base_version is None else self.staged.get(base_version)
        choice = self._delta_choices.setdefault(lane, DeltaChoice())
        while members:
            started = time.monotonic()
            report.transport = transport or self._transport(members)
            names = [member.server_id for member in members]
            tries_delta = base is not None and self._sends_delta(report.transport, names, choice)
            shipment = self._shipment(staged, base if tries_delta else None, report)
            outcome = self._attempt(shipment, members, lane, report)
            base = None
            if outcome.needs_full:
                continue
            if outcome.is_success:
                choice.record(report.transport, names, time.monotonic() - started, tried_delta=tries_delta)
            report.failed |= outcome.failed
            if report.committed:
                break
            members = [member for member in members if member.server_id not in outcome.failed]
            if self._is_superseded(staged.policy_version):
                report.superseded = [member.server_id for member in members]
                break

    def write_snapshot(self, policy_version: int, folder: Path) -> None:
        """Write a version to a folder that engines and Hugging Face can load. Snapshot pushes then use the folder."""
        write_snapshot_folder(
            self.staged[policy_version], self.config.model.path, folder, self._deadline("writing a snapshot")
        )
        self.kept_snapshots[policy_version] = folder

    def _sends_delta(self, transport: str, members: Sequence[str], choice: DeltaChoice) -> bool:
        """Return whether to try a delta: as configured, or with `auto` if deltas were faster so far."""
        if self.config.weights.delta == "auto":
            return choice.takes_delta(transport, members)
        return bool(self.config.weights.delta) and transport not in NO_DELTA_TRANSPORTS

    def _shipment(self, staged: StagedVersion, base: StagedVersion | None, report: PushReport) -> Shipment:
        """Make a delta on the base, or whole buckets without one."""
        if base is None:
            return Shipment(staged.manifest, staged)
        with report.timed("encode"):
            return delta_shipment(staged, base, self._deadline("encoding a delta"))

    def _attempt(self, shipment: Shipment, members: list[PushTarget], lane: str, report: PushReport) -> AttemptOutcome:
        """Try once. Members that do not support the transport fail before anything is sent."""
        unable = {m.server_id: why for m in members if (why := why_unable(report.transport, m))}
        if unable:
            return AttemptOutcome(unable)
        sender = self._sender(lane, report.transport)
        timeout_s = self.config.weights.push_timeout_s
        return PushAttempt(shipment, members, sender, self._calls, timeout_s, report).run()

    def _is_superseded(self, policy_version: int) -> bool:
        versions = list(self.staged.items())  # the training thread adds to it
        return any(version > policy_version and staged.is_complete for version, staged in versions)

    def _transport(self, members: list[PushTarget]) -> str:
        """Return the configured transport, or the one that `auto` picks. A new choice is logged."""
        configured = self.config.weights.transport
        if configured != "auto":
            return configured
        device = device_uuid(self.device)
        nccl_version = "" if device == "cpu" else libraries.nccl_version()
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
        """Where to stage buckets: as configured, else on the GPU if the transport can use it, else on the host.

        Host memory is shared if `shm` may be used."""
        weights = self.config.weights
        on_device = self.device.type == "cuda" and weights.transport in ("auto", "nccl", "cuda_ipc")
        if weights.staging == "device" or (weights.staging == "auto" and on_device):
            return "device"
        return "shared" if weights.transport in ("auto", "shm") else "host"


def why_unable(transport: str, member: PushTarget) -> str:
    """Return why the member cannot receive by the transport, or an empty string if it can."""
    if transport not in member.transports:
        return f"it cannot receive by {transport}; set weights.transport to auto, or install what the transport needs"
    if transport == "nccl" and (own := libraries.nccl_version()) != member.nccl_version:
        return version_mismatch(own, member.nccl_version)
    return ""
