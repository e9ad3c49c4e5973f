"""A member whose engine has weights but does not generate: a commit copies the stage into them, as an engine's does."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from penstock.config.run import RunConfig
from penstock.v1 import weights_pb2
from penstock.weights.checksums import MIX64, weights_digest
from penstock_rollout.engines.engine import CommitReport
from penstock_rollout.fleet.membership import reported_nccl_version
from penstock_rollout.weights.reception import device_uuid
from penstock_rollout.weights.stage import StageSlot, bucket_checksum
from weights_gpu_parts.engine import member
from weights_gpu_parts.ranks import be_a_host_of_its_own

START_TIMEOUT_S = 60.0


class ResidentEngine:
    """Serves the weights that it has copied from a verified stage."""

    name = "resident"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.devices = (device_uuid(device),)
        self.policy_version = 0
        self.weights_digest = ""
        self.weights: dict[str, torch.Tensor] = {}
        self._slot = StageSlot(Path("unused"), device)

    @property
    def retained_version(self) -> int | None:
        loaded = self._slot.loaded
        return loaded.kept_version if loaded is not None else None

    async def stage_weights(self, announcement: weights_pb2.AnnounceRequest) -> None:
        self._slot.begin(announcement)

    async def commit_weights(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> CommitReport:
        stage = await asyncio.to_thread(self._slot.verified, policy_version, bucket_checksums, timeout_s)
        named = list(stage.tensors())
        if not self.weights:
            self.weights = {name: torch.empty_like(tensor, device=self.device) for name, tensor in named}
        started = time.monotonic()
        for name, tensor in named:
            self.weights[name].copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        load_s = time.monotonic() - started
        self._slot.loaded = stage
        self.policy_version, self.weights_digest = policy_version, weights_digest(bucket_checksums)
        return CommitReport(stage.receive_s, load_s, paused_s=load_s, running_requests=0)

    async def abort_weights(self) -> None:
        self._slot.abort()


class MemberProcess:
    """Runs the member's gRPC service in a thread. This is the object of a Child."""

    def __init__(self, config: RunConfig, device_type: str) -> None:
        be_a_host_of_its_own()
        self._engine = ResidentEngine(torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu"))
        self._target: Future[dict[str, Any]] = Future()
        threading.Thread(target=lambda: asyncio.run(self._serve(config)), daemon=True).start()

    async def _serve(self, config: RunConfig) -> None:
        async with member(config, self._engine) as target:
            self._target.set_result(target | {"nccl_version": reported_nccl_version(self._engine.devices)})
            await asyncio.Event().wait()

    def target(self) -> dict[str, Any]:
        return self._target.result(START_TIMEOUT_S)

    def checksums(self) -> dict[str, str]:
        """The checksum of every weight that would serve now."""
        return tensor_checksums(self._engine.weights)


def tensor_checksums(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: bucket_checksum(MIX64, tensor.view(-1).view(torch.uint8)) for name, tensor in weights.items()}
