"""Where an engine that receives weights in its own process keeps them: at most one stage, and what was loaded last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from penstock.errors import WeightPushFailed
from penstock_rollout.engines.engine import StageRequest
from penstock_rollout.weights.stage import WeightStage


class StageSlot:
    """A newer stage takes the place of an older one, which is aborted."""

    def __init__(self, model_folder: Path) -> None:
        self.loaded: WeightStage | None = None
        """Set by the engine when it has loaded a stage: the next delta's base, or buffers to fill again."""
        self._model_folder = model_folder
        self._stage: WeightStage | None = None

    @property
    def retained_version(self) -> int | None:
        loaded = self.loaded
        return loaded.manifest.policy_version if loaded and loaded.manifest.retain else None

    def begin(self, request: StageRequest, device: torch.device | None = None) -> None:
        self.abort()
        self._stage = WeightStage(request, self._model_folder, device=device, last=self.loaded)
        self._stage.start()

    async def verified(self, policy_version: int, bucket_checksums: list[str], timeout_s: float) -> WeightStage:
        """The stage of that version, received and equal to what was announced. The slot is free afterwards, also when
        WeightPushFailed says why there is none."""
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
        """End a stage, and forget it unless another one has taken its place."""
        stage.abort()
        if self._stage is stage:
            self._stage = None
