"""Fetch a model once into a folder that processes share: from the Hub, from an object store, or from another folder.

    lock ─► complete already? ─► download each file, continuing partial ones ─► compare ─► write the marker

The marker `.penstock-model.json` comes last. It names the source and has size and checksum of every file. A folder
without it is not complete; a killed fetch is continued by the next one. A lock beside the folder keeps two fetches
apart, also on different machines if the volume supports `flock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from penstock.errors import ConfigError, DeadlineExceeded, Unavailable
from penstock.fetching.object_folder import CHUNK_BYTES, ObjectFolder, ObjectInfo, is_url
from penstock.hub import MODEL_FILES, download_model, is_hub_id

MARKER = ".penstock-model.json"
FIELD = "SOURCE"
LOCK_POLL_S = 0.5
READ_BYTES = 2**20
_MD5 = re.compile(r"^[0-9a-f]{32}$")


def fetch_model(source: str, target: Path, timeout_s: float, *, verify: bool = False) -> str:
    """Make `target` hold the model, and return a sentence that says what was done.

    `timeout_s` bounds the wait for another fetch of the same folder, and for a store that does not answer. With
    `verify`, a folder that is complete already is read and compared with its checksums."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, timeout_s):
        if (known := _read_marker(target, source)) is not None:
            if damage := _find_damage(target, known, is_read=verify):
                raise ConfigError(f"{damage}; remove {target / MARKER}, and the model is fetched again")
            return f"{target} is complete already"
        target.mkdir(exist_ok=True)
        if is_url(source):
            _from_store(ObjectFolder(source, FIELD, timeout_s), target)
        elif Path(source).is_dir():
            _from_folder(Path(source), target)
        elif is_hub_id(Path(source)):
            download_model(Path(source), target)
        else:
            raise ConfigError(f"{FIELD} {source} is no folder, no s3:// URL and no Hub id such as Qwen/Qwen2.5-0.5B")
        files = _model_files(target)
        if "config.json" not in files:
            raise ConfigError(f"{FIELD} {source} is not a model: it has no config.json")
        _write_marker(target, source, files)
    num_bytes = sum(file.stat().st_size for file in files.values())
    return f"fetched {len(files)} files ({num_bytes / 2**30:.2f} GiB) from {source} to {target}"


@contextlib.contextmanager
def _locked(target: Path, timeout_s: float) -> Iterator[None]:
    path, deadline = target.with_name(f"{target.name}.lock"), time.monotonic() + timeout_s
    with path.open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"another fetch has held {path} for {timeout_s:.0f} s; let it finish, or stop it"
                    ) from error
                time.sleep(LOCK_POLL_S)
        yield


def _from_store(store: ObjectFolder, target: Path) -> None:
    objects = {name: info for name, info in store.list().items() if _is_wanted(name)}
    if not objects:
        raise ConfigError(f"{FIELD}: {store.url} has no model files ({', '.join(MODEL_FILES)})")
    for name, info in sorted(objects.items()):
        _download(store, name, info, target / name)


def _download(store: ObjectFolder, name: str, info: ObjectInfo, path: Path) -> None:
    """Download one object. A partial file is continued if it is of the same object, which its name tells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    version = xxhash.xxh3_64_hexdigest(f"{info.etag} {info.num_bytes}".encode())
    partial = path.with_name(f"{path.name}.{version}.partial")
    for stale in path.parent.glob(f"{path.name}.*.partial"):
        if stale != partial:
            stale.unlink()
    with partial.open("ab") as file:
        while (start := file.tell()) < info.num_bytes:
            file.write(store.read_part(name, start, min(start + CHUNK_BYTES, info.num_bytes)))
            file.flush()
        os.fsync(file.fileno())
    if partial.stat().st_size != info.num_bytes or not _has_md5(partial, info.etag):
        partial.unlink()
        raise Unavailable(f"{store.url}/{name} arrived damaged and was removed; fetch again")
    partial.rename(path)


def _has_md5(path: Path, etag: str) -> bool:
    """Whether a file has the MD5 that an S3 etag is. The etag of an object of several parts is no MD5: then true."""
    if not _MD5.match(etag):
        return True
    checksum = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while content := file.read(READ_BYTES):
            checksum.update(content)
    return checksum.hexdigest() == etag


def _from_folder(source: Path, target: Path) -> None:
    for file in sorted(_model_files(source).values()):
        path = target / file.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        shutil.copyfile(file, partial)
        if _checksum(partial) != _checksum(file):
            raise Unavailable(f"{file} was copied wrongly; check the disk of {target}")
        partial.rename(path)


def _model_files(folder: Path) -> dict[str, Path]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if _is_wanted(name)}


def _is_wanted(name: str) -> bool:
    is_hidden = any(part.startswith(".") for part in Path(name).parts)
    return not is_hidden and any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in MODEL_FILES)


def _write_marker(target: Path, source: str, files: Mapping[str, Path]) -> None:
    records = {
        name: {"num_bytes": path.stat().st_size, "xxh3_128": _checksum(path)} for name, path in sorted(files.items())
    }
    partial = target / f"{MARKER}.partial"
    with partial.open("w") as file:
        json.dump({"source": source, "files": records}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(target / MARKER)


def _read_marker(target: Path, source: str) -> dict[str, dict[str, object]] | None:
    """The files of a complete folder, or None if it is not complete."""
    try:
        marker = json.loads((target / MARKER).read_text())
        files: dict[str, dict[str, object]] = marker["files"]
        found = marker["source"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{target / MARKER} is damaged ({error}); remove it, and the model is fetched again"
        ) from error
    if found != source:
        raise ConfigError(f"{target} holds {found}, not {source}; choose another folder, or remove it")
    return files


def _find_damage(target: Path, files: Mapping[str, Mapping[str, object]], *, is_read: bool) -> str:
    for name, record in files.items():
        path = target / name
        if not path.is_file() or path.stat().st_size != record["num_bytes"]:
            return f"{path} is missing or has another size than when it was fetched"
        if is_read and _checksum(path) != record["xxh3_128"]:
            return f"{path} is damaged: its checksum is not the one of the fetch"
    return ""


def _checksum(path: Path) -> str:
    checksum = xxhash.xxh3_128()
    with path.open("rb") as file:
        while content := file.read(READ_BYTES):
            checksum.update(content)
    return checksum.hexdigest()
