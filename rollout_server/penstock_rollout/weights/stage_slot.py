"""The stages of an engine that receives weights in its own process: at most one new stage, and the one loaded last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock_rollout.weights.stage import WeightStage


class StageSlot:
    """Holds at most one new stage. Beginning another one aborts it."""

    def __init__(self, model_folder: Path) -> None:
        self.loaded: WeightStage | None = None
        """The stage that the engine loaded last. The engine sets it. The next stage uses it as `WeightStage.last`."""
        self._model_folder = model_folder
        self._stage: WeightStage | None = None

    @property
    def retained_version(self) -> int | None:
        """The version that a delta can be sent on, if any."""
        return self.loaded.kept_version if self.loaded else None

    def begin(self, announcement: weights_pb2.AnnounceRequest, device: torch.device | None = None) -> None:
        """Start to receive the announced version."""
        self.abort()
        self._stage = WeightStage(announcement, self._model_folder, device=device, last=self.loaded)
        self._stage.start()

    async def verified(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> WeightStage:
        """Wait for the stage of that version, compare its checksums and return it.

        Raises WeightPushFailed if the version is not staged, fails, does not arrive in time or has other checksums. The
        stage then leaves the slot, whether it is returned or not."""
        stage = self._stage
        if stage is None or stage.manifest.policy_version != policy_version:
            staged = stage.manifest.policy_version if stage else None
            raise WeightPushFailed(f"version {policy_version} is not staged; {staged} is")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wrap_future(stage.done)
        except TimeoutError as error:
            self._drop(stage)
            raise WeightPushFailed(f"version {policy_version} did not arrive within {timeout_s:g} s") from error
        self._drop(stage)
        if why := stage.failure or stage.mismatch(bucket_checksums):
            raise WeightPushFailed(why)
        return stage

    def abort(self) -> None:
        if self._stage is not None:
            self._drop(self._stage)

    def _drop(self, stage: WeightStage) -> None:
        """End the stage's thread. Empty the slot, unless another stage has taken its place."""
        stage.abort()
        if self._stage is stage:
            self._stage = None
