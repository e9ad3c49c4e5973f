"""Checksums of files: made while a file is written, compared before it is loaded. Files are compared in parallel."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

PIECE_BYTES = 2**20
_NUM_THREADS = 8


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written."""

    num_bytes: int
    xxh3_128: str

    @classmethod
    def of(cls, content: bytes) -> FileRecord:
        return cls(len(content), xxhash.xxh3_128_hexdigest(content))


def find_damage(folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
    """Read the files and compare them with their records. Returns a phrase for each damaged one. Blocks."""
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="verify") as pool:
        found = pool.map(lambda name: _file_damage(folder / name, files[name]), sorted(files))
        return [damage for damage in found if damage]


def _file_damage(path: Path, expected: FileRecord) -> str:
    """What is wrong with a file, or an empty text."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{path} is truncated or changed: expected {expected.num_bytes} bytes, found {num_bytes}"
        checksum = read_checksum(path)
    except FileNotFoundError:
        return f"{path} is missing: expected {expected.num_bytes} bytes"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if checksum != expected.xxh3_128:
        return f"{path} is damaged: expected checksum {expected.xxh3_128}, found {checksum}"
    return ""


def read_checksum(path: Path) -> str:
    """The checksum of a file's present content."""
    checksum = xxhash.xxh3_128()
    piece = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(piece):
            checksum.update(piece[:num_bytes])
    return checksum.hexdigest()
