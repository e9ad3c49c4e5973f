"""The receiver of weights inside one of SGLang's scheduler processes."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.v1 import weights_pb2
from penstock_rollout.weights.device_name import device_uuid
from penstock_rollout.weights.stage import WeightStage


class StageWorker:
    """Holds at most one new stage, one that was verified, and the one loaded last.

    Beginning another stage aborts the new one, but not the verified one, which may be loading.

    The rollout server calls the methods named in CALLS, in threads beside the scheduler. Arguments and results are
    plain values, never weights. Only `tensors` touches the serving weights, and only the scheduler calls it."""

    CALLS = ("device", "stage", "verify", "abort")

    def __init__(self, model_folder: Path, rank: int, device: torch.device) -> None:
        self._model_folder = model_folder
        self._rank = rank
        self._device = device
        self._stage: WeightStage | None = None
        self._verified: WeightStage | None = None
        self._loaded: WeightStage | None = None

    def device(self) -> str:
        """Return `cpu`, or the UUID of this process's GPU."""
        return device_uuid(self._device)

    def stage(self, announcement: str) -> None:
        """Start to receive the version of an AnnounceRequest in base64."""
        self.abort()
        request = weights_pb2.AnnounceRequest.FromString(base64.b64decode(announcement))
        self._stage = WeightStage(
            request, self._model_folder, worker=self._rank, device=self._device, last=self._loaded
        )
        self._stage.start()

    def verify(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> dict[str, Any]:
        """Wait for the version and compare its checksums. `why` is the reason why it cannot be loaded, or empty."""
        stage = self._stage
        if stage is None or stage.manifest.policy_version != policy_version:
            staged = stage.manifest.policy_version if stage else None
            return {"why": f"version {policy_version} is not staged; {staged} is", "receive_s": 0.0}
        try:
            stage.done.result(timeout_s)
            why = stage.failure or stage.mismatch(bucket_checksums)
        except TimeoutError:
            why = f"version {policy_version} did not arrive within {timeout_s:g} s"
            stage.abort()
        if self._stage is stage:
            self._stage = None
        if not why:
            self._verified = stage
        return {"why": why, "receive_s": stage.receive_s}

    def abort(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.abort()

    def tensors(self, policy_version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a version that was verified. When they are consumed, it is the one loaded last."""
        stage = self._verified
        assert stage is not None and stage.manifest.policy_version == policy_version, "only what was verified is loaded"
        yield from stage.tensors()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the next stage fills these buffers again
        self._loaded, self._verified = stage, None
