"""The interface of a sender, the bytes that it sends, and the servers that it sends them to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.deadline import Deadline
from penstock.weights.snapshot import write_snapshot
from penstock_learner.weights.memory import SharedBuckets
from penstock_learner.weights.push import PushTarget
from penstock_learner.weights.staging import StagedVersion


@dataclass(frozen=True)
class Shipment:
    """The bytes to send: for each bucket either the staged bucket itself or a delta on another version."""

    manifest: weights_pb2.WeightManifest
    staged: StagedVersion
    deltas: tuple[torch.Tensor | None, ...] = ()

    def wires(self, deadline: Deadline) -> Iterator[torch.Tensor]:
        """Yield the bytes of each bucket in order, as soon as it is staged. They may be on the host or on a GPU."""
        for index in range(len(self.manifest.buckets)):
            delta = self.deltas[index] if self.deltas else None
            yield self.staged.bucket(index, deadline) if delta is None else delta


class Sender(Protocol):
    """Serves one push at a time: open, send, close. It lives as long as the publisher.

    A sender may keep its connections from push to push while the members stay the same. Every wait in `send` ends at
    the deadline. After a failure the next `open` starts from scratch."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        """Prepare to connect to the members' workers, whose ranks are 1, 2, … in order. Returns the rendezvous.

        It must not enter a collective, because members learn the rendezvous only afterwards."""
        ...

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Send every bucket to every worker. Raises WeightPushFailed if the transfer breaks."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the push. If it failed, drop everything that a dead or late member could still block."""
        ...


class ShmSender:
    """The rendezvous is a path under /proc. Members map that memory when it is sealed."""

    def open(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> str:
        memory = shipment.staged.memory
        if not isinstance(memory, SharedBuckets):
            raise WeightPushFailed(f"shm needs buckets in shared memory, not {memory.kind}; unset weights.staging")
        return memory.path

    def send(self, shipment: Shipment, members: Sequence[PushTarget], deadline: Deadline) -> None:
        """Wait until the buckets are sealed. The members then map them without further help."""
        shipment.staged.wait_sealed(deadline)

    def close(self, *, failed: bool) -> None:
        pass


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


MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.json",
               "merges.txt", "special_tokens_map.json", "chat_template.jinja")  # fmt: skip


def write_snapshot_folder(staged: StagedVersion, model_path: Path, folder: Path, deadline: Deadline) -> None:
    """Write the weights, once they are complete, and copy the small files of the model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in MODEL_FILES:
        if (source := model_path / name).is_file():
            shutil.copyfile(source, folder / name)  # without its mode
    checksums = staged.checksums(deadline)
    write_snapshot(folder, staged.manifest, [bucket.cpu().numpy() for bucket in staged.memory.buckets], checksums)
