"""Writing DCP's shards with checksums, and reading them without executing anything that they contain.

The checksums of files are computed while they are written.

DCP writes the index of a checkpoint, and values that are not tensors, with pickle, and its own reader runs whatever
these say. A checkpoint may come from object storage, so here only the classes of an index and plain values are made.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.serialization import _get_layout

from penstock_learner.checkpoints import READ_BYTES, FileRecord, PieceChecksums

_CLASSES: dict[tuple[str, str], Any] = {
    (made.__module__, made.__qualname__): made
    for made in (
        index.BytesStorageMetadata, index.ChunkStorageMetadata, index.Metadata, index.MetadataIndex, index.StorageMeta,
        index.TensorProperties, index.TensorStorageMetadata, index._MEM_FORMAT_ENCODING, _StorageInfo, _get_layout,
    )
} | {("torch", "Size"): torch.Size, ("pathlib", "PosixPath"): pathlib.PurePosixPath}  # fmt: skip


def load_shards(state: dict[str, Any], folder: Path, *, no_dist: bool = False) -> None:
    """Fill `state` from the shards in `folder`, in place. With `no_dist` this process reads all of them. Raises
    CheckpointException or RuntimeError if the index or a value holds anything but what DCP writes there."""
    load(state, storage_reader=_IndexReader(folder), planner=_PlainValues(), no_dist=no_dist)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise RuntimeError(f"the index of the shards names {module}.{name}, which no index does")


class _IndexReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> index.Metadata:
        with Path(self._get_metadata_path(kwargs.get("rank"))).open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, index.Metadata):
            raise RuntimeError("the index of the shards is not an index")
        found.storage_meta = found.storage_meta or index.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class _PlainValues(DefaultLoadPlanner):
    """Reads values that are not tensors, such as an optimizer's settings, as plain numbers, texts and lists."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


# ── writing ──


class HashingWriter(FileSystemWriter):
    """Writes a rank's shards, and on rank 0 the index of all shards. `records` describes the files by name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.records: dict[str, FileRecord] = {}
        self.fs = _HashingFileSystem(self.records)


class _HashingFileSystem(FileSystem):
    def __init__(self, records: dict[str, FileRecord]) -> None:
        self.records = records

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with _HashedFile(io.FileIO(path, mode)) as stream:
            yield stream
        self.records[Path(path).name] = stream.checksums.record()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashedFile(io.BufferedWriter):
    """A file that is written from start to end, and hashed meanwhile."""

    def __init__(self, file: io.FileIO) -> None:
        super().__init__(file)
        self.checksums = PieceChecksums()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), READ_BYTES):
            part = view[start : start + READ_BYTES]
            self.checksums.add(part)
            super().write(part)
        return len(view)
