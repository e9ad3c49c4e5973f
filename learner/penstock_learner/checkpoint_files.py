"""The files of a checkpoint: checksums in pieces, the manifest that lists them, and flushing to disk.

Pieces of one large file are compared in parallel, before it is loaded. `manifest.json` has two lines: the files as
JSON, and the checksum of that line. Checksums are made while the files are written, so a save reads nothing back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from penstock.errors import CheckpointDamaged

PIECE_BYTES = 64 * 2**20
READ_BYTES = 2**20
"""What is read or written at once. It is hashed while it is in the processor's cache."""
_NUM_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written."""

    num_bytes: int
    pieces: tuple[str, ...]
    """The xxh3_128 of each PIECE_BYTES of the file."""

    def __post_init__(self) -> None:
        if len(self.pieces) != -(-self.num_bytes // PIECE_BYTES):
            raise ValueError(f"{len(self.pieces)} checksums of {self.num_bytes} bytes")

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        checksums = PieceChecksums()
        checksums.add(memoryview(content))
        return checksums.record()

    @classmethod
    def of_file(cls, path: Path) -> FileRecord:
        """Describe the present content of a file. Blocks."""
        num_bytes = path.stat().st_size
        indices = range(-(-num_bytes // PIECE_BYTES))
        return cls(num_bytes, tuple(_read_checksum(path, index) for index in indices))


class PieceChecksums:
    """Computes the record of content that arrives from start to end."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._pieces: list[str] = []
        self._current = xxhash.xxh3_128()

    def add(self, content: memoryview) -> None:
        while content:
            room = PIECE_BYTES - self.num_bytes % PIECE_BYTES
            part, content = content[:room], content[room:]
            self._current.update(part)
            self.num_bytes += len(part)
            if len(part) == room:
                self._pieces.append(self._current.hexdigest())
                self._current.reset()

    def record(self) -> FileRecord:
        last = [self._current.hexdigest()] if self.num_bytes % PIECE_BYTES else []
        return FileRecord(self.num_bytes, (*self._pieces, *last))


def find_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Read the files and compare them with their records. Returns a phrase for each damaged one. Blocks."""
    pieces = [(name, index) for name, record in sorted(files.items()) for index in range(max(1, len(record.pieces)))]
    damages: dict[str, str] = {}
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="verify") as pool:
        found = pool.map(lambda piece: _damage(folder / piece[0], files[piece[0]], piece[1]), pieces)
        for (name, _), damage in zip(pieces, found, strict=True):
            if damage:
                damages.setdefault(name, damage)
    return list(damages.values())


def _damage(path: Path, expected: FileRecord, index: int) -> str:
    """What is wrong with a file or with one of its pieces, or an empty text."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{path} is truncated or changed: expected {expected.num_bytes} bytes, found {num_bytes}"
        checksum = _read_checksum(path, index) if num_bytes else ""
    except FileNotFoundError:
        return f"{path} is missing: expected {expected.num_bytes} bytes"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if num_bytes and checksum != expected.pieces[index]:
        start = index * PIECE_BYTES
        return f"{path} is damaged: expected checksum {expected.pieces[index]}, found {checksum} from byte {start} on"
    return ""


def _read_checksum(path: Path, index: int) -> str:
    checksum, left = xxhash.xxh3_128(), PIECE_BYTES
    buffer = memoryview(bytearray(min(READ_BYTES, PIECE_BYTES)))
    with path.open("rb", buffering=0) as file:
        file.seek(index * PIECE_BYTES)
        while left and (num_bytes := file.readinto(buffer[: min(left, len(buffer))])):
            checksum.update(buffer[:num_bytes])
            left -= num_bytes
    return checksum.hexdigest()


def flush(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk. Blocks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MANIFEST_FILE = "manifest.json"


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Describe every file of the folder. The files whose records are `known` are not read again. Raises
    CheckpointDamaged if one of them is missing or has another size. Does not flush the manifest to disk."""
    found = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    for name, record in known.items():
        if found.get(name) != record.num_bytes:
            raise CheckpointDamaged(
                f"{folder / name} was not written completely: expected {record.num_bytes} bytes, found "
                f"{found.get(name, 'no file')}; is the disk full?"
            )
    files = {name: known.get(name) or FileRecord.of_file(folder / name) for name in sorted(found)}
    fields = {name: {"num_bytes": file.num_bytes, "pieces": file.pieces} for name, file in files.items()}
    line = json.dumps(fields).encode()
    (folder / MANIFEST_FILE).write_bytes(line + b"\n" + xxhash.xxh3_128_hexdigest(line).encode() + b"\n")


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint. Raises CheckpointDamaged if the manifest is missing or damaged."""
    path = folder / MANIFEST_FILE
    try:
        line, checksum, rest = path.read_bytes().split(b"\n")
        found = xxhash.xxh3_128_hexdigest(line)
        if found.encode() != checksum or rest:
            raise CheckpointDamaged(f"{path} is damaged: expected checksum {checksum.decode()}, found {found}")
        files = json.loads(line)
        return {name: FileRecord(int(file["num_bytes"]), tuple(file["pieces"])) for name, file in files.items()}
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointDamaged(
            f"{path} is damaged: expected a line of files and its checksum, found {error}"
        ) from error
