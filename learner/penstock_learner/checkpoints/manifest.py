"""The manifest of a checkpoint: size and checksums of every file, so that a damaged file is found before it is loaded.

`manifest.json` has two lines: the files as JSON, and the checksum of that line. The checksums are made while the files
are written (roles/hashing_writer.py), so a save reads nothing back. Manifests of older versions, which have one
checksum for each whole file, are read too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from penstock.errors import CheckpointDamaged
from penstock_learner.file_checksums import FileRecord

MANIFEST_FILE = "manifest.json"


def write_manifest(folder: Path, known: Mapping[str, FileRecord]) -> None:
    """Describe every file of the folder. `known` are the records of files, by path, that need not be read again.

    Raises CheckpointDamaged if a known file is missing or has another size. Does not flush the manifest to disk."""
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
        return {name: _read_record(file) for name, file in files.items()}
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise CheckpointDamaged(
            f"{path} is damaged: expected a line of files and its checksum, found {error}"
        ) from error


def _read_record(file: Mapping[str, Any]) -> FileRecord:
    if "xxh3_128" in file:
        return FileRecord.of_whole(int(file["num_bytes"]), file["xxh3_128"])
    return FileRecord(int(file["num_bytes"]), tuple(file["pieces"]))
