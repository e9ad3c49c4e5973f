"""A DCP writer that computes the checksum of every file while it writes it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from penstock_learner.file_checksums import READ_BYTES, FileRecord, PieceChecksums


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
        with Path(path).open(mode) as file:
            stream = _HashedFile(file)
            yield stream
            self.records[Path(path).name] = stream.checksums.record()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class _HashedFile(io.IOBase):
    """A file that is written from start to end, and hashed meanwhile."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.checksums = PieceChecksums()

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        for start in range(0, len(view), READ_BYTES):
            part = view[start : start + READ_BYTES]
            self.checksums.add(part)
            self.file.write(part)
        return len(view)

    def tell(self) -> int:
        return self.checksums.num_bytes

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        super().close()
        self.file.close()
