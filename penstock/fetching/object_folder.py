"""A folder in an object store, named by a URL such as `s3://bucket/prefix`.

fsspec does the work. `s3://` needs s3fs (the extra `[objectstore]`) and takes what users of S3 know: AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL for other servers than Amazon's, or the identity of a pod. Other
schemes of fsspec work if their package is installed. All calls block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, Unavailable

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
    """The objects under one URL. `field` names the setting that has the URL, for errors.

    A call that fails is tried again until `timeout_s`. Then it raises Unavailable. A refusal raises ConfigError."""

    def __init__(self, url: str, field: str, timeout_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self.field = field
        self.timeout_s = timeout_s
        self._fs, self._root = _open(self.url, field)

    def list(self) -> dict[str, ObjectInfo]:
        """All objects, by their path below the folder."""
        try:
            found = self._retry(lambda: self._fs.find(self._root, detail=True), "list its objects")
        except FileNotFoundError as error:
            raise ConfigError(f"{self.field}: {self.url} does not exist ({_short(error)}); make the bucket") from error
        return {
            path.removeprefix(self._root).lstrip("/"): ObjectInfo(int(info["size"]), _etag(info))
            for path, info in found.items()
            if path != self._root
        }

    def read(self, name: str) -> bytes:
        """The content of a small object."""
        content: bytes = self._retry(lambda: self._fs.cat_file(self._path(name)), f"read {name}")
        return content

    def read_part(self, name: str, start: int, end: int) -> bytes:
        part: bytes = self._retry(
            lambda: self._fs.cat_file(self._path(name), start=start, end=end), f"read {name} from byte {start}"
        )
        return part

    def write(self, name: str, content: bytes) -> None:
        self._retry(lambda: self._fs.pipe_file(self._path(name), content), f"write {name}")

    def upload(self, file: Path, name: str) -> None:
        """Write a local file. Raises Unavailable if the store then has another size."""
        self._retry(lambda: self._fs.put_file(str(file), self._path(name)), f"upload {name}")
        stored = int(self._retry(lambda: self._fs.info(self._path(name), refresh=True), f"look at {name}")["size"])
        if stored != file.stat().st_size:
            raise Unavailable(f"{self.url}/{name} has {stored} bytes after its upload, not {file.stat().st_size}")

    def remove(self, name: str) -> None:
        """Remove an object. It is no error if it is gone."""

        def remove() -> None:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

        self._retry(remove, f"remove {name}")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _retry(self, call: Callable[[], T], what: str) -> T:
        deadline, wait_s = time.monotonic() + self.timeout_s, FIRST_WAIT_S
        while True:
            self._fs.invalidate_cache()
            try:
                return call()
            except REFUSALS as error:
                raise ConfigError(f"{self.field}: {self.url} refuses to {what} ({_short(error)}); check it") from error
            except FileNotFoundError:
                raise
            except Exception as error:  # the stores' libraries have no common error
                if time.monotonic() + wait_s > deadline:
                    raise Unavailable(
                        f"{self.url} could not {what} for {self.timeout_s:.0f} s ({_short(error)}); check the store, "
                        "its credentials and the network"
                    ) from error
                logger.warning("%s could not %s yet: %s", self.url, what, _short(error))
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)


def is_url(text: str) -> bool:
    return "://" in text


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
        raise ConfigError(f"{field}: {url} is not a URL that fsspec knows ({_short(error)})") from error
    filesystem.retries = 1  # ObjectFolder has its own deadline
    return filesystem, str(root).rstrip("/")


def _etag(info: dict[str, Any]) -> str:
    return str(info.get("ETag") or info.get("etag") or info.get("mtime") or "").strip('"')


def _short(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
