"""snapshot: write one safetensors file. Members read it from a shared volume."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.weights.deadline import Deadline
from penstock_learner.weights.senders.sender import PushTarget, Shipment
from penstock_learner.weights.snapshot_folder import write_snapshot_folder


class SnapshotSender:
    """The rendezvous is the folder. The folder is removed after the push, unless the run keeps it as a snapshot."""

    def __init__(self, folder: Path, kept: dict[int, Path], model_path: Path) -> None:
        self.folder = folder
        self.kept = kept
        """Folders of the snapshots that the run keeps, by version."""
        self.model_path = model_path
        self._own: Path | None = None

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        staged = shipment.staged
        kept = self.kept.get(staged.policy_version)
        if kept is not None and kept.is_dir():
            return str(kept.resolve())
        self._own = self.folder / f"version-{staged.policy_version:08d}"
        write_snapshot_folder(staged, self.model_path, self._own, deadline)
        return str(self._own.resolve())

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Do nothing: the members read the file."""

    def close(self, *, failed: bool) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
