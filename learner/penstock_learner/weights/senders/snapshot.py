"""snapshot: write one safetensors file, which members read from a shared volume."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.weights.patience import Patience
from penstock_learner.weights.senders.sender import PushTarget, Shipment
from penstock_learner.weights.staging import StagedVersion


class SnapshotSender:
    """The rendezvous is the folder. It is removed after the push, unless it is a snapshot that the run keeps."""

    def __init__(self, folder: Path, kept: dict[int, Path], write: Callable[[StagedVersion, Path], None]) -> None:
        self.folder = folder
        self.kept = kept
        """By version: snapshots that are on the volume already."""
        self._write = write
        self._own: Path | None = None

    def open(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> str:
        staged = shipment.staged
        kept = self.kept.get(staged.policy_version)
        if kept is not None and kept.is_dir():
            return str(kept.resolve())
        self._own = self.folder / f"version-{staged.policy_version:08d}"
        patience.until(staged.complete.is_set)
        self._write(staged, self._own)
        return str(self._own.resolve())

    def send(self, shipment: Shipment, members: Sequence[PushTarget], patience: Patience) -> None:
        """The members read on their own."""

    def close(self, *, failed: bool) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
