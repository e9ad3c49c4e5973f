"""Datasets: files of prompts in the run's folder that are submitted as a whole.

A file is uploaded, or put into the folder by hand. Redis keeps how many of its prompts were submitted, as it does for
a dataset that is fed, so every prompt is submitted once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.api import records
from penstock.api.records import Dataset, Int32, Record
from penstock.codec import encode_prompt, sampling_from_proto
from penstock.errors import Conflict, InvalidInput, NotFound, Unavailable
from penstock.feed.datasets import read_prompts
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import FeedPosition
from penstock.store.keys import check_name
from penstock.store.ownership import Owner
from penstock.trajectory import Prompt, Sampling
from penstock.v1 import datasets_pb2
from penstock_services.gateway import checks
from penstock_services.gateway.access import Caller
from penstock_services.gateway.operations import Handlers, operation
from penstock_services.gateway.rest import DATASET_TYPES, HttpRequest

FORMATS = ("jsonl", "parquet")
SUBMITTED_AT_ONCE = 256
SUBMIT_TIMEOUT_S = 300.0
READ_TIMEOUT_S = 60.0


class SubmitDataset(Record):
    num_samples: Int32 = 8
    sampling: records.Sampling = records.Sampling()


async def read_upload(_: DatasetHandlers, http: HttpRequest) -> datasets_pb2.UploadDatasetRequest:
    kind = http.content_type
    if kind not in DATASET_TYPES:
        raise InvalidInput("content-type", f"must be one of {', '.join(DATASET_TYPES)}, not {kind!r}")
    return datasets_pb2.UploadDatasetRequest(name=http.params["name"], format=DATASET_TYPES[kind], content=http.body)


@dataclass
class DatasetHandlers(Handlers):
    queue: RedisReplayQueue

    @property
    def folder(self) -> Path:
        return self.config.folder / "datasets"

    @operation("PUT", "datasets/{name}", "submit", Dataset, read=read_upload, timeout_s=READ_TIMEOUT_S)
    async def upload_dataset(self, caller: Caller, request: datasets_pb2.UploadDatasetRequest) -> datasets_pb2.Dataset:
        """Store a file of prompts. Its Content-Type is application/x-ndjson or application/vnd.apache.parquet."""
        check_name("name", request.name)
        if request.format not in FORMATS:
            raise InvalidInput("format", f"must be one of {', '.join(FORMATS)}")
        path = self.folder / f"{request.name}.{request.format}"
        staged = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
        staging = asyncio.ensure_future(asyncio.to_thread(self._stage, staged, path.name, request.content))
        try:
            # A request that ends early leaves the thread running, which writes the file.
            num_prompts = await asyncio.shield(staging)
            # The owner is known before the file has its name, so no one else ever finds it without one. A name that was
            # given by hand, in either format, has no owner and gets none.
            claimed = "" if self._stored(request.name) else caller.owner.name
            feed = await self.queue.feed(f"upload-{path.stem}", "", 0, [], [], owner=claimed)
            if not caller.owner.may_use(feed.owner):
                raise Conflict(f"dataset {request.name!r} is another key's; choose another name")
            await asyncio.to_thread(self._name, staged, path)
        finally:
            staging.add_done_callback(partial(_remove, staged))
        return await self._describe(path, caller.owner, num_prompts)

    @operation("GET", "datasets/{name}", "read", Dataset, timeout_s=READ_TIMEOUT_S)
    async def get_dataset(self, caller: Caller, request: datasets_pb2.GetDatasetRequest) -> datasets_pb2.Dataset:
        return await self._describe(self._find(request.name), caller.owner)

    @operation("POST", "datasets/{name}:submit", "submit", Dataset, takes=SubmitDataset, timeout_s=SUBMIT_TIMEOUT_S)
    async def submit_dataset(self, caller: Caller, request: datasets_pb2.SubmitDatasetRequest) -> datasets_pb2.Dataset:
        """Submit every prompt of the dataset once, however often this is called."""
        path = self._find(request.name)
        if not 1 <= request.num_samples <= checks.MAX_NUM_SAMPLES:
            raise InvalidInput("num_samples", f"must be between 1 and {checks.MAX_NUM_SAMPLES}")
        checks.sampling(request.sampling)
        sampling = sampling_from_proto(request.sampling)
        digest, feed = await self._feed(path, caller.owner)
        prompts = await asyncio.to_thread(lambda: list(self._read(path, request.num_samples, sampling)))
        owner = feed.owner or caller.owner.name
        while feed.fingerprint == digest and feed.position < len(prompts):
            chunk = prompts[feed.position : feed.position + SUBMITTED_AT_ONCE]
            payloads = [encode_prompt(replace(prompt, owner=owner)) for prompt in chunk]
            priorities = [prompt.priority for prompt in chunk]
            feed = await self.queue.feed(f"upload-{path.stem}", digest, feed.position, payloads, priorities)
        if feed.fingerprint != digest:
            raise Conflict(f"other data was submitted as dataset {request.name!r} before; choose another name")
        return await self._describe(path, caller.owner, len(prompts))

    def _find(self, name: str) -> Path:
        check_name("name", name)
        if stored := self._stored(name):
            return stored[0]
        raise NotFound(f"there is no dataset {name!r}; upload it, or put NAME.jsonl or NAME.parquet into {self.folder}")

    def _stored(self, name: str) -> list[Path]:
        """The files of this name, of any format."""
        return [path for kind in FORMATS if (path := self.folder / f"{name}.{kind}").is_file()]

    async def _feed(self, path: Path, owner: Owner) -> tuple[str, FeedPosition]:
        """Digest of the file, and how far it was submitted. Raises NotFound for another owner's."""
        digest = await asyncio.to_thread(_digest, path)
        feed = await self.queue.feed(f"upload-{path.stem}", digest, 0, [], [])
        if not owner.may_use(feed.owner):
            raise NotFound(f"there is no dataset {path.stem!r}; upload it")
        return digest, feed

    def _stage(self, staged: Path, name: str, content: bytes) -> int:
        """Write the content to `staged`, check it, and count its prompts."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            staged.touch(mode=0o600)
            staged.write_bytes(content)
            return self._count(staged)
        except OSError as error:
            raise Unavailable(f"{self.folder} cannot be written: {error.strerror}") from error
        except InvalidInput as error:
            raise InvalidInput("content", str(error).replace(str(staged), name)) from error

    def _name(self, staged: Path, path: Path) -> None:
        """Give the checked file its name in one step. If two uploads race, the first one wins."""
        is_taken = any(other != path for other in self._stored(path.stem))
        try:
            with contextlib.suppress(FileExistsError):
                if not is_taken:
                    os.link(staged, path)
                    return
            if is_taken or path.read_bytes() != staged.read_bytes():
                raise Conflict(f"other data is stored as dataset {path.stem!r}; choose another name")
        except OSError as error:
            raise Unavailable(f"{self.folder} cannot be written: {error.strerror}") from error

    async def _describe(self, path: Path, owner: Owner, num_prompts: int = 0) -> datasets_pb2.Dataset:
        """`num_prompts` saves reading the file again, which may take a process."""
        digest, feed = await self._feed(path, owner)
        num_prompts = num_prompts or await asyncio.to_thread(self._count, path)
        return datasets_pb2.Dataset(
            name=path.stem, format=path.suffix.removeprefix("."), num_prompts=num_prompts,
            num_submitted=feed.position if feed.fingerprint == digest else 0,
            num_bytes=(await asyncio.to_thread(path.stat)).st_size,
        )  # fmt: skip

    def _read(self, path: Path, num_samples: int, sampling: Sampling) -> Iterator[Prompt]:
        limits = self.config.gateway.limits
        return read_prompts(path, num_samples=num_samples, sampling=sampling, limits=limits)

    def _count(self, path: Path) -> int:
        """Check every prompt of the file, one after the other, and count them."""
        num_prompts = sum(1 for _ in self._read(path, 1, Sampling()))
        if not num_prompts:
            raise InvalidInput(str(path), "holds no prompts")
        return num_prompts


def _remove(staged: Path, staging: asyncio.Future[int]) -> None:
    """Remove the file once nothing writes it. The request has told the error, unless it has ended."""
    if not staging.cancelled():
        staging.exception()
    staged.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
