"""The weight publisher: holds one version as buckets and brings it to members of the weight group.

    announce ──all ready──► broadcast buckets ──► commit at every member
        │                        │                   │
        └─ a member failed: it leaves the push; announce again to the rest ◄─┘ (only before the first commit)

No collective is entered before every member has answered the announcement. Every call and collective has a deadline.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not listed
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2, weights_pb2_grpc
from penstock.weights.cluster_key import call_metadata
from penstock.weights.manifest import TensorShape, allocate_buckets, build_manifest, checksum, weights_digest
from penstock.weights.snapshot import write_snapshot
from penstock_learner.model import DTYPES

logger = logging.getLogger(__name__)
SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
               "merges.txt", "special_tokens_map.json", "chat_template.jinja")  # fmt: skip


@dataclass(frozen=True)
class PushTarget:
    server_id: str
    address: str


@dataclass(frozen=True)
class PushReport:
    policy_version: int
    weights_digest: str
    committed: list[str]
    """Servers that serve the version now."""
    failed: dict[str, str]
    """Servers to evict, and why."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall clock by phase."""
    num_bytes: int = 0
    running_requests: int = 0
    """Requests in flight, over all members, while their version flipped."""
    max_paused_s: float = 0.0


class WeightPublisher:
    """Buckets of the newest gathered version. `begin`, `put` and `seal` alternate with `push`, never overlap it."""

    def __init__(self, config: RunConfig, host: str) -> None:
        self.config = config
        self.host = host
        self.manifest = weights_pb2.WeightManifest()
        self.buckets: list[NDArray[np.uint8]] = []
        self.checksums: list[str] = []
        self._specs: dict[str, weights_pb2.TensorSpec] = {}
        self._channels: dict[str, grpc.Channel] = {}
        self._pushes = 0
        self._push_folder: Path | None = None

    def begin(self, policy_version: int, term: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        shapes = [
            TensorShape(name, SAFETENSORS_NAMES[self._wire_dtype], tuple(weight.shape)) for name, weight in weights
        ]
        bucket_bytes = self.config.weights.bucket_bytes
        self.manifest = build_manifest(self.config.run, policy_version, term, shapes, bucket_bytes)
        self._specs = {spec.name: spec for spec in self.manifest.tensors}
        self.buckets = allocate_buckets(self.manifest)

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Copy one whole weight to its place, cast to the engine's type."""
        spec = self._specs[name]
        view = self.buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        torch.from_numpy(view).view(self._wire_dtype).view(weight.shape).copy_(weight)

    def seal(self) -> None:
        self.checksums = [checksum(bucket) for bucket in self.buckets]

    def write_snapshot(self, folder: Path) -> None:
        """A folder that engines and Hugging Face load: the weights, and the model's small files."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in MODEL_FILES:
            if (source := self.config.model.path / name).is_file():
                shutil.copy(source, folder / name)
        write_snapshot(folder, self.manifest, self.buckets)

    def push(self, targets: list[PushTarget]) -> PushReport:
        """Bring the sealed version to as many targets as can take it. Never raises for a member's failure."""
        failed: dict[str, str] = {}
        seconds = {"announce": 0.0, "transfer": 0.0, "commit": 0.0}
        members = list(targets)
        responses: dict[str, weights_pb2.CommitResponse] = {}
        while members:
            refused = self._announce(members, seconds)
            if not refused:
                refused = self._transfer(members, seconds)
            if not refused:
                responses, refused = self._commit(members, seconds)
                failed |= refused
                break
            failed |= refused
            self._abort(members, "another member failed; the push starts again without it")
            members = [member for member in members if member.server_id not in refused]
        if self._push_folder is not None:
            shutil.rmtree(self._push_folder, ignore_errors=True)
        return PushReport(
            policy_version=self.manifest.policy_version,
            weights_digest=weights_digest(self.checksums),
            committed=sorted(responses),
            failed=failed,
            seconds=seconds,
            num_bytes=sum(bucket.num_bytes for bucket in self.manifest.buckets) * len(responses),
            running_requests=sum(response.running_requests for response in responses.values()),
            max_paused_s=max((response.paused_s for response in responses.values()), default=0.0),
        )

    def _announce(self, members: list[PushTarget], seconds: dict[str, float]) -> dict[str, str]:
        """Everyone ready, or the ones who are not, with reasons."""
        weights = self.config.weights
        self._pushes += 1
        self._prefix = f"push-{self._pushes}"
        if weights.transport == "snapshot":
            self._push_folder = self.config.folder / "pushes" / f"version-{self.manifest.policy_version:08d}"
            self.write_snapshot(self._push_folder)
            rendezvous = str(self._push_folder.resolve())
        else:
            self._store = self._open_store(len(members) + 1)
            rendezvous = f"{self.host}:{self._store.port}/{self._prefix}"
        requests = [
            weights_pb2.AnnounceRequest(
                manifest=self.manifest, transport=weights.transport, rendezvous=rendezvous, rank=rank,
                world_size=len(members) + 1, deadline_s=weights.push_timeout_s,
            )
            for rank, _ in enumerate(members, start=1)
        ]  # fmt: skip
        _, refused = self._call_all(
            members, lambda stub: stub.Announce, requests, weights.ready_timeout_s, "announce", seconds
        )
        return refused

    def _open_store(self, world_size: int) -> TCPStore:
        """A store on a free port, which it binds itself."""
        return TCPStore(
            self.host,
            0,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=self.config.weights.push_timeout_s),
            wait_for_workers=False,
        )

    def _transfer(self, members: list[PushTarget], seconds: dict[str, float]) -> dict[str, str]:
        """Broadcast every bucket. A broken group cannot tell who broke it: those who do not answer an abort did, and
        when all answer, all leave the push and come back as latecomers."""
        if self.config.weights.transport == "snapshot":
            return {}
        started = time.monotonic()
        timeout = timedelta(seconds=self.config.weights.push_timeout_s)
        try:
            store = PrefixStore(self._prefix, self._store)
            group: Any = ProcessGroupGloo(store, 0, len(members) + 1, timeout)
            for bucket in self.buckets:
                group.broadcast(torch.from_numpy(bucket), 0).wait(timeout)
        except RuntimeError as error:
            silent = self._abort(members, "the transfer broke")
            return silent or {member.server_id: f"transfer: {error}" for member in members}
        finally:
            seconds["transfer"] += time.monotonic() - started
        return {}

    def _commit(
        self, members: list[PushTarget], seconds: dict[str, float]
    ) -> tuple[dict[str, weights_pb2.CommitResponse], dict[str, str]]:
        timeout_s = self.config.weights.push_timeout_s
        request = weights_pb2.CommitRequest(
            policy_version=self.manifest.policy_version,
            term=self.manifest.term,
            bucket_checksums=self.checksums,
            deadline_s=timeout_s,
        )
        return self._call_all(members, lambda stub: stub.Commit, [request] * len(members), timeout_s, "commit", seconds)

    def _abort(self, members: list[PushTarget], reason: str) -> dict[str, str]:
        """Tell everyone to forget the stage; returns those who did not answer."""
        request = weights_pb2.AbortRequest(
            policy_version=self.manifest.policy_version, reason=reason, term=self.manifest.term
        )
        _, silent = self._call_all(members, lambda stub: stub.Abort, [request] * len(members), 5.0, "abort", {})
        return silent

    def _call_all(
        self,
        members: list[PushTarget],
        method: Callable[[Any], Any],
        requests: list[Any],
        timeout_s: float,
        phase: str,
        seconds: dict[str, float],
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """One call to every member at once: answers, and failures with reasons."""
        started = time.monotonic()
        metadata = call_metadata(self.config.weights)
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
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - started
        return answers, failures

    def _stub(self, member: PushTarget) -> weights_pb2_grpc.WeightMemberServiceStub:
        if member.address not in self._channels:
            options = [("grpc.max_send_message_length", 64 * 2**20)]
            self._channels[member.address] = grpc.insecure_channel(member.address, options=options)
        return weights_pb2_grpc.WeightMemberServiceStub(self._channels[member.address])

    @property
    def _wire_dtype(self) -> torch.dtype:
        return DTYPES[self.config.model.dtype]
