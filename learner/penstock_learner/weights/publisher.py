"""The weight publisher: stages versions as buckets and brings them to members of the weight group.

    announce ──all ready──► transfer, bucket by bucket ──► commit at every member
        │                        │                             │
        └─ a member failed: it leaves the push; announce again to the rest ◄─┘ (only before the first commit)

No collective is entered before every member has answered the announcement. Every call and collective has a deadline.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from penstock.config.run import RunConfig
from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.checksums import weights_digest
from penstock.weights.manifest import TensorShape, build_manifest, wire_sizes
from penstock.weights.patience import Patience
from penstock.weights.snapshot import write_snapshot
from penstock.weights.transports import has_cupy, host_id
from penstock_learner.model.precision import DTYPES
from penstock_learner.weights.delta_shipment import delta_shipment
from penstock_learner.weights.device_memory import device_uuid
from penstock_learner.weights.member_calls import MemberCalls
from penstock_learner.weights.memory import MemoryKind, MemoryPool
from penstock_learner.weights.senders.choose import PublisherPlace, choose_transport
from penstock_learner.weights.senders.make import make_sender
from penstock_learner.weights.senders.sender import PushTarget, Sender, Shipment, num_ranks
from penstock_learner.weights.senders.snapshot import SnapshotSender
from penstock_learner.weights.staging import StagedVersion, checksum_name

logger = logging.getLogger(__name__)
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DELTA_TRANSPORTS = ("nccl", "gloo")
"""The others do not send bytes over a network."""
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
               "merges.txt", "special_tokens_map.json", "chat_template.jinja")  # fmt: skip


@dataclass
class PushReport:
    """What became of one push."""

    policy_version: int
    transport: str = ""
    weights_digest: str = ""
    committed: list[str] = field(default_factory=list)
    """Servers that serve the version now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Servers to evict, and why."""
    superseded: list[str] = field(default_factory=list)
    """Servers that were spared it: the push would have started again, and a newer version was staged by then. In that
    case nobody has committed it."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall clock by phase: announce, transfer and commit as the publisher sees them; receive, load and pause of the
    slowest member."""
    num_bytes: int = 0
    """Sent to each worker, times the workers that committed."""
    running_requests: int = 0
    """Requests in flight, over all members, while their version flipped."""

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - started


class WeightPublisher:
    """Holds the version that is being gathered, and those that are being pushed or were pushed last.

    `begin` and StagedVersion.put are called by the training thread, `push` by one thread a lane; the caller of `begin`
    says which versions the others still need."""

    def __init__(self, config: RunConfig, host: str, device: torch.device | None = None) -> None:
        self.config = config
        self.host = host
        self.device = device or torch.device("cpu")
        self.staged: dict[int, StagedVersion] = {}
        self.kept_snapshots: dict[int, Path] = {}
        self._memory = MemoryPool(self.device)
        self._calls = MemberCalls(config.weights)
        self._senders: dict[tuple[str, str], Sender] = {}
        """By lane and transport."""
        self._chosen = ("", "")

    def begin(
        self,
        policy_version: int,
        term: int,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        *,
        keep: Sequence[int] = (),
        adapter_scale: float | None = None,
    ) -> StagedVersion:
        """Make room for a version. Forgets every other but those to keep."""
        weights = self.config.weights
        dtype = DTYPES[self.config.model.dtype]
        tensors = [TensorShape(name, SAFETENSORS_NAMES[dtype], shape) for name, shape in shapes]
        manifest = build_manifest(self.config.run, policy_version, term, tensors, weights.bucket_bytes)
        for version in self.staged.keys() - set(keep):
            self._memory.give_back(self.staged.pop(version).memory)
        memory = self._memory.take(self._memory_kind, [bucket.num_bytes for bucket in manifest.buckets])
        manifest.checksum = checksum_name(memory)
        manifest.retain = weights.delta
        memory.is_reusable = not weights.delta
        if adapter_scale is not None:
            manifest.adapter.scale = adapter_scale
        staged = self.staged[policy_version] = StagedVersion(manifest, memory, dtype)
        return staged

    def push(
        self,
        policy_version: int,
        targets: Sequence[PushTarget],
        *,
        transport: str | None = None,
        base_version: int | None = None,
        lane: str = "push",
    ) -> PushReport:
        """Bring a staged version to as many targets as can take it. Never raises for a member's failure.

        `base_version`: what all targets serve, on which a delta may be sent. Lanes push at the same time."""
        self._patience("staging").until(lambda: policy_version in self.staged)
        staged = self.staged[policy_version]
        report = PushReport(policy_version)
        members = list(targets)
        base = None if base_version is None else self.staged.get(base_version)
        while members:
            report.transport = transport or self._transport(members)
            shipment = self._shipment(staged, base, report.transport)
            refused, needs_full = self._attempt(shipment, members, lane, report)
            if needs_full:
                base = None
                continue
            report.failed |= refused
            if report.committed:
                break
            members = [member for member in members if member.server_id not in refused]
            if self._is_superseded(policy_version):
                report.superseded = [member.server_id for member in members]
                break
        report.weights_digest = weights_digest(staged.checksums(self._patience("hashing")))
        return report

    def write_snapshot(self, policy_version: int, folder: Path) -> None:
        """Keep a version in a folder that engines and Hugging Face load."""
        self.write_staged(self.staged[policy_version], folder)
        self.kept_snapshots[policy_version] = folder

    def _shipment(self, staged: StagedVersion, base: StagedVersion | None, transport: str) -> Shipment:
        """A delta on the base where there is one and bytes travel; whole buckets otherwise."""
        if base is None or transport not in DELTA_TRANSPORTS:
            return Shipment(staged.manifest, staged)
        return delta_shipment(staged, base, self._patience("encoding a delta"))

    def _attempt(
        self, shipment: Shipment, members: list[PushTarget], lane: str, report: PushReport
    ) -> tuple[dict[str, str], bool]:
        """Announce, transfer, commit. Returns those who must leave, and whether a member lacks the delta's base."""
        unable = {m.server_id: _cannot(report.transport) for m in members if report.transport not in m.transports}
        if unable:
            return unable, False
        sender = self._sender(lane, report.transport)
        try:
            with report.timed("announce"):
                refused, needs_full = self._announce(sender, shipment, members, report.transport)
            if not refused and not needs_full:
                with report.timed("transfer"):
                    refused = self._transfer(sender, shipment, members)
            if refused or needs_full:
                sender.close(failed=True)
                # One that failed is not waited for again: should it have staged after all, its own deadline ends that,
                # and until then it may read the buckets.
                if refused:
                    shipment.staged.memory.is_reusable = False
                left = [member for member in members if member.server_id not in refused]
                self._abort(shipment, left, "the push starts again without a member that failed")
                return refused, needs_full
            with report.timed("commit"):
                refused = self._commit(shipment, members, report)
            sender.close(failed=bool(refused))
            if refused:
                self._abort(shipment, [m for m in members if m.server_id in refused], "it did not commit in time")
            return refused, False
        except WeightPushFailed as error:
            sender.close(failed=True)
            self._abort(shipment, members, str(error))
            return {member.server_id: str(error) for member in members}, False

    def _announce(
        self, sender: Sender, shipment: Shipment, members: list[PushTarget], transport: str
    ) -> tuple[dict[str, str], bool]:
        """Everyone ready, or the ones who are not, with reasons."""
        rendezvous = sender.open(shipment, members, self._patience("opening the transfer"))
        requests, rank = [], 1
        for member in members:
            requests.append(
                weights_pb2.AnnounceRequest(
                    manifest=shipment.manifest, transport=transport, rendezvous=rendezvous, rank=rank,
                    world_size=num_ranks(members), deadline_s=self.config.weights.push_timeout_s,
                )
            )  # fmt: skip
            rank += len(member.devices)
        answers, refused = self._calls.announce(members, requests)
        return refused, any(answer.needs_full for answer in answers.values())

    def _transfer(self, sender: Sender, shipment: Shipment, members: list[PushTarget]) -> dict[str, str]:
        """A broken transfer cannot tell who broke it: those who do not answer an abort did, and when all answer, all
        leave the push and come back as latecomers."""
        try:
            sender.send(shipment, members, self._patience("sending weights"))
        except WeightPushFailed as error:
            sender.close(failed=True)
            silent = self._abort(shipment, members, "the transfer broke")
            return silent or {member.server_id: f"transfer: {error}" for member in members}
        return {}

    def _commit(self, shipment: Shipment, members: list[PushTarget], report: PushReport) -> dict[str, str]:
        manifest = shipment.manifest
        request = weights_pb2.CommitRequest(
            policy_version=manifest.policy_version,
            term=manifest.term,
            bucket_checksums=shipment.staged.checksums(self._patience("hashing")),
            deadline_s=self.config.weights.push_timeout_s,
        )
        responses, refused = self._calls.commit(members, request)
        report.committed = sorted(responses)
        workers = sum(len(member.devices) for member in members if member.server_id in responses)
        report.num_bytes = sum(wire_sizes(manifest)) * workers
        report.running_requests = sum(response.running_requests for response in responses.values())
        for phase, values in (
            ("receive", [response.receive_s for response in responses.values()]),
            ("load", [response.load_s for response in responses.values()]),
            ("pause", [response.paused_s for response in responses.values()]),
        ):
            report.seconds[phase] = max(values, default=0.0)
        return refused

    def _abort(self, shipment: Shipment, members: list[PushTarget], reason: str) -> dict[str, str]:
        """Tell everyone to forget the stage; returns those who did not answer, and may still read the buckets."""
        manifest = shipment.manifest
        request = weights_pb2.AbortRequest(policy_version=manifest.policy_version, reason=reason, term=manifest.term)
        silent = self._calls.abort(members, request)
        if silent:
            shipment.staged.memory.is_reusable = False
        return silent

    def _is_superseded(self, policy_version: int) -> bool:
        versions = list(self.staged.items())  # the training thread adds to them
        return any(version > policy_version and staged.complete.is_set() for version, staged in versions)

    def _transport(self, members: list[PushTarget]) -> str:
        """The configured transport, or the one that `auto` picks; a new choice is logged."""
        configured = self.config.weights.transport
        if configured != "auto":
            return configured
        device = device_uuid(self.device)
        chosen = choose_transport(PublisherPlace(host_id(), device, self._memory_kind, has_cupy()), members)
        if chosen != self._chosen:
            logger.info("weights travel by %s: %s", *chosen)
            self._chosen = chosen
        return chosen[0]

    def _sender(self, lane: str, transport: str) -> Sender:
        key = (lane, transport)
        if key not in self._senders:
            self._senders[key] = (
                SnapshotSender(self.config.folder / "pushes" / lane, self.kept_snapshots, self.write_staged)
                if transport == "snapshot"
                else make_sender(transport, self.host, self.device)
            )
        return self._senders[key]

    def write_staged(self, staged: StagedVersion, folder: Path) -> None:
        """The weights, and the model's small files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            if (source := self.config.model.path / name).is_file():
                shutil.copy(source, folder / name)
        checksums = staged.checksums(self._patience("staging"))
        write_snapshot(folder, staged.manifest, [bucket.cpu().numpy() for bucket in staged.memory.buckets], checksums)

    def _patience(self, doing: str) -> Patience:
        return Patience(self.config.weights.push_timeout_s, doing)

    @property
    def _memory_kind(self) -> MemoryKind:
        """Where buckets are staged: as configured, else on a GPU if there is one; shared wherever shm may be used."""
        weights = self.config.weights
        on_device = self.device.type == "cuda" and weights.transport in ("auto", "nccl", "cuda_ipc")
        if weights.staging == "device" or (weights.staging == "auto" and on_device):
            return "device"
        return "shared" if weights.transport in ("auto", "shm") else "host"


def _cannot(transport: str) -> str:
    return f"it cannot receive by {transport}; set weights.transport to auto, or install what the transport needs"
