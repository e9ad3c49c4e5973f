"""Fetch a model once into a folder that processes share: from the Hub, an object store, another folder, or a GGUF file.
Folders of other files, such as data and reward functions, are fetched in the same way from stores and folders alone.

    lock ─► complete already? ─► download each file, continuing partial ones ─► compare ─► write the marker

The marker `.penstock-model.json` comes last. It names the source and has size and checksum of every file. A folder
without it is not complete; a killed fetch is continued by the next one. A lock in the folder keeps two fetches
apart, also on different machines if the volume supports `flock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from penstock.errors import ConfigError, DeadlineExceeded, Unavailable, named
from penstock.hub import MODEL_FILES, is_hub_id, local_model
from penstock.machine import written_whole

logger = logging.getLogger(__name__)
T = TypeVar("T")
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 15.0
CHUNK_BYTES = 16 * 2**20
"""How much of an object is downloaded at once, and repeated at most after an interruption."""
REFUSALS = (PermissionError, ValueError)
"""Errors that waiting does not cure: wrong credentials, a name that the store does not accept."""


@dataclass(frozen=True)
class ObjectInfo:
    num_bytes: int
    etag: str
    """Changes with the content. For an S3 object that was put in one piece, often its MD5. Empty if unknown."""


class ObjectFolder:
    """The objects under one URL such as `s3://bucket/prefix`, which the setting `field` has. A failed call is retried
    until `timeout_s` and then raises Unavailable. A refusal raises ConfigError. All calls block.

    fsspec does the work. `s3://` needs s3fs (the extra `[objectstore]`) and takes AWS_ACCESS_KEY_ID,
    AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL for other servers than Amazon's, or the identity of a pod.

    `on_failure` is called for each call that fails, also if it is retried, in the thread of the call."""

    def __init__(self, url: str, field: str, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.field = field
        self.timeout_s = timeout_s
        self.on_failure: Callable[[], object] = lambda: None
        self._fs, self._root = _open(self.url, field)

    def list(self) -> dict[str, ObjectInfo]:
        """All objects, by their path below the folder."""
        try:
            found = self._retry(lambda: self._fs.find(self._root, detail=True), "list its objects")
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.field}: {self.url} does not exist ({named(error)[:200]}); make the bucket"
            ) from error
        return {
            path.removeprefix(self._root).lstrip("/"): ObjectInfo(
                int(info["size"]), str(info.get("ETag") or info.get("etag") or info.get("mtime") or "").strip('"')
            )
            for path, info in found.items()
            if path != self._root
        }

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """The content of an object, or a part of it."""
        path, what = self._path(name), f"read {name} from byte {start}"
        content: bytes = self._retry(lambda: self._fs.cat_file(path, start=start, end=end), what)
        return content

    def download(self, name: str, path: Path, num_bytes: int) -> None:
        """Append what a file does not have yet of an object of `num_bytes`, and flush it to the disk."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            while (start := file.tell()) < num_bytes:
                file.write(self.read(name, start, min(start + CHUNK_BYTES, num_bytes)))
                file.flush()
            os.fsync(file.fileno())

    def upload(self, file: Path, name: str) -> None:
        """Write a local file. Raises Unavailable if the store then has another size."""
        self._retry(lambda: self._fs.put_file(str(file), self._path(name)), f"upload {name}")
        stored = int(self._retry(lambda: self._fs.info(self._path(name), refresh=True), f"look at {name}")["size"])
        if stored != file.stat().st_size:
            self.on_failure()
            raise Unavailable(f"{self.url}/{name} has {stored} bytes after its upload, not {file.stat().st_size}")

    def remove(self, name: str) -> None:
        """Remove an object. It is not an error if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            self._retry(lambda: self._fs.rm_file(self._path(name)), f"remove {name}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _retry(self, call: Callable[[], T], what: str) -> T:
        deadline, wait_s = time.monotonic() + self.timeout_s, FIRST_WAIT_S
        while True:
            self._fs.invalidate_cache()
            try:
                return call()
            except REFUSALS as error:
                self.on_failure()
                raise ConfigError(
                    f"{self.field}: {self.url} refuses to {what} ({named(error)[:200]}); check it"
                ) from error
            except FileNotFoundError:
                raise
            except Exception as error:  # the stores' libraries have no common error
                self.on_failure()
                if time.monotonic() + wait_s > deadline:
                    raise Unavailable(
                        f"{self.url} could not {what} for {self.timeout_s:.0f} s ({named(error)[:200]}); check the "
                        "store, its credentials and the network"
                    ) from error
                logger.warning("%s could not %s yet: %s", self.url, what, named(error)[:200])
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)


def _open(url: str, field: str) -> tuple[Any, str]:
    scheme = url.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{field}: {url} needs fsspec; pip install 'penstock[objectstore]'") from error
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme == "s3":
        timeouts = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
        options["config_kwargs"] = {**timeouts, "retries": {"total_max_attempts": 1}}
    try:
        filesystem, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(
            f"{field}: {url} needs a package that is not installed ({error}); for s3://, pip install "
            "'penstock[objectstore]'"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{field}: {url} is not a URL that fsspec knows ({named(error)[:200]})") from error
    filesystem.retries = 1  # ObjectFolder has its own deadline
    return filesystem, str(root).rstrip("/")


MARKER = ".penstock-model.json"
FIELD = "SOURCE"
LOCK_POLL_S = 0.5
GGUF_SUFFIXES = (".gguf", ".whl")
_MD5 = re.compile(r"^[0-9a-f]{32}$")


def fetch_model(source: str, target: Path, timeout_s: float, *, verify: bool = False, all_files: bool = False) -> str:
    """Make `target` hold the model, or `all_files` of a folder that need not be one, and return a sentence that says
    what was done. `timeout_s` bounds waits for another fetch and for the store. `verify` compares a complete folder
    with its checksums."""
    wanted = ("*",) if all_files else MODEL_FILES
    target.mkdir(parents=True, exist_ok=True)
    with _locked(target, timeout_s):
        if (known := _read_marker(target, source)) is not None:
            if damage := _find_damage(target, known, is_read=verify):
                raise ConfigError(f"{damage}; remove {target / MARKER}, and the model is fetched again")
            return f"{target} is complete already"
        if "://" in source:
            store = ObjectFolder(source, FIELD, timeout_s)
            objects = {name: info for name, info in store.list().items() if _is_wanted(name, wanted)}
            if not objects:
                raise ConfigError(f"{FIELD}: {store.url} has no files like {', '.join(wanted)}; give the folder's URL")
            for name, info in sorted(objects.items()):
                _download(store, name, info, target / name)
        elif Path(source).is_dir():
            _from_folder(Path(source), target, wanted)
        elif not all_files and Path(source).suffix in GGUF_SUFFIXES and Path(source).is_file():
            _write_gguf_folder(Path(source), target)
        elif not all_files and is_hub_id(Path(source)):
            local_model(Path(source), FIELD, target=target)
        else:
            models = " nor a Hub id such as Qwen/Qwen2.5-0.5B nor a GGUF file (.gguf or .whl)"
            raise ConfigError(f"{FIELD} {source} is neither a folder nor an s3:// URL" + ("" if all_files else models))
        files = _files(target, wanted)
        if not all_files and "config.json" not in files:
            raise ConfigError(f"{FIELD} {source} is not a model: it has no config.json")
        _write_marker(target, source, files)
    num_bytes = sum(file.stat().st_size for file in files.values())
    return f"fetched {len(files)} files ({num_bytes / 2**30:.2f} GiB) from {source} to {target}"


@contextlib.contextmanager
def _locked(target: Path, timeout_s: float) -> Iterator[None]:
    path, deadline = target / ".penstock-fetch.lock", time.monotonic() + timeout_s
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


def _download(store: ObjectFolder, name: str, info: ObjectInfo, path: Path) -> None:
    """Download one object. A partial file is continued if it is of the same object, which its name tells."""
    version = xxhash.xxh3_64_hexdigest(f"{info.etag} {info.num_bytes}".encode())
    partial = path.with_name(f"{path.name}.{version}.partial")
    for stale in path.parent.glob(f"{path.name}.*.partial"):
        if stale != partial:
            stale.unlink()
    store.download(name, partial, info.num_bytes)
    # The etag of an S3 object in one piece is an MD5, that of an object in parts is not.
    is_md5 = _MD5.match(info.etag) is not None
    is_whole = not is_md5 or _checksum(partial, lambda: hashlib.md5(usedforsecurity=False)) == info.etag
    if partial.stat().st_size != info.num_bytes or not is_whole:
        partial.unlink()
        raise Unavailable(f"{store.url}/{name} arrived damaged and was removed; fetch again")
    partial.rename(path)


def _from_folder(source: Path, target: Path, wanted: tuple[str, ...]) -> None:
    for file in sorted(_files(source, wanted).values()):
        path = target / file.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            shutil.copyfile(file, partial)
            if _checksum(partial) != _checksum(file):
                raise Unavailable(f"{file} was damaged by copying; check the disk of {target}")


def _write_gguf_folder(source: Path, target: Path) -> None:
    try:  # by name, because this package may not import the packages above it
        reader = importlib.import_module("penstock_tools.gguf_model")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{FIELD} {source} is a GGUF file, which needs pip install 'penstock[tools]'") from error
    reader.write_folder(source, target)


def _files(folder: Path, wanted: tuple[str, ...]) -> dict[str, Path]:
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if _is_wanted(name, wanted)}


def _is_wanted(name: str, wanted: tuple[str, ...]) -> bool:
    is_hidden = any(part.startswith(".") for part in Path(name).parts)
    return not is_hidden and any(fnmatch.fnmatch(Path(name).name, pattern) for pattern in wanted)


def _write_marker(target: Path, source: str, files: Mapping[str, Path]) -> None:
    records = {
        name: {"num_bytes": path.stat().st_size, "xxh3_128": _checksum(path)} for name, path in sorted(files.items())
    }
    with written_whole(target / MARKER) as partial:
        partial.write_text(json.dumps({"source": source, "files": records}, indent=1))


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


def _checksum(path: Path, kind: Callable[[], Any] = xxhash.xxh3_128) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()
