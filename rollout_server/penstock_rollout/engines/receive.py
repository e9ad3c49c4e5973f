"""The receiving ends of the weight transports, and the stage that runs them beside the serving engine.

Nothing here knows an engine: buckets arrive in host memory, in the layout of the manifest. Every wait has a deadline
and ends early when the stage is aborted: a publisher that stalls or never comes costs a thread for a moment, no more.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.manifest import allocate_buckets, checksum
from penstock.weights.snapshot import read_snapshot
from penstock_rollout.engines.engine import StageRequest

POLL_S = 0.002
CONNECT_RETRY_S = 0.05
PUBLISHER_RANK = 0

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}

Phase = Literal["receiving", "received", "failed"]


class _Patience:
    """A deadline that an event can cut short."""

    def __init__(self, timeout_s: float, aborted: threading.Event, doing: str) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._aborted = aborted
        self._doing = doing

    @property
    def left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)

    @property
    def over(self) -> bool:
        return self._aborted.is_set() or time.monotonic() > self._deadline

    def check(self) -> None:
        """Raise WeightPushFailed once it is over."""
        if self._aborted.is_set():
            raise WeightPushFailed(f"{self._doing} was aborted")
        if self.over:
            raise WeightPushFailed(f"{self._doing} took longer than {self._timeout_s:g} s; is the publisher alive?")

    def until(self, done: Callable[[], bool], poll_s: float = POLL_S) -> None:
        while not done():
            self.check()
            self._aborted.wait(poll_s)


class _PatientStore(Store):
    """A store whose waits end with a _Patience: gloo's own rendezvous cannot be interrupted otherwise."""

    def __init__(self, inner: Any, patience: _Patience) -> None:
        super().__init__()
        self._inner = inner
        self._patience = patience

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._inner.get(key)

    def add(self, key: str, amount: int) -> int:
        return int(self._inner.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._patience.until(lambda: self.check(keys), poll_s=0.01)


def parse_rendezvous(rendezvous: str) -> tuple[str, int, str]:
    """Split `host:port/prefix`."""
    address, slash, prefix = rendezvous.partition("/")
    host, colon, port = address.rpartition(":")
    if not (slash and colon and host and prefix and port.isdigit()):
        raise WeightPushFailed(f"rendezvous {rendezvous!r} is not host:port/prefix")
    return host.strip("[]"), int(port), prefix


def receive_gloo(
    manifest: weights_pb2.WeightManifest,
    rendezvous: str,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    aborted: threading.Event | None = None,
) -> list[NDArray[np.uint8]]:
    """Join the publisher's gloo group and take part in one broadcast a bucket, in order."""
    host, port, prefix = parse_rendezvous(rendezvous)
    patience = _Patience(timeout_s, aborted or threading.Event(), f"receiving weights from {rendezvous}")
    patience.until(lambda: _listens(host, port, patience.left_s), poll_s=CONNECT_RETRY_S)
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=patience.left_s))
        group = ProcessGroupGloo(
            _PatientStore(PrefixStore(prefix, store), patience), rank, world_size, timedelta(seconds=patience.left_s)
        )
        buckets = allocate_buckets(manifest)
        for bucket in buckets:
            _broadcast(group, torch.from_numpy(bucket), patience)
    except RuntimeError as error:
        patience.check()
        raise WeightPushFailed(f"receiving weights from {rendezvous} failed: {_first_line(error)}") from error
    return buckets


def receive_snapshot(manifest: weights_pb2.WeightManifest, folder: Path) -> list[NDArray[np.uint8]]:
    """Read the buckets from a snapshot on a shared volume."""
    try:
        return read_snapshot(folder, manifest)
    except OSError as error:
        raise WeightPushFailed(f"reading the snapshot in {folder} failed: {_first_line(error)}") from error


def _listens(host: str, port: int, left_s: float) -> bool:
    """Whether the publisher's store is up. TCPStore would retry on its own, and could not be aborted."""
    try:
        with socket.create_connection((host, port), timeout=min(left_s, 1.0)):
            return True
    except OSError:
        return False


def _broadcast(group: Any, tensor: torch.Tensor, patience: _Patience) -> None:
    work = group.broadcast([tensor], _from_publisher())
    try:
        patience.until(work.is_completed)
    except WeightPushFailed:
        _break_connections(group, work)
        raise
    work.wait()


def _break_connections(group: Any, work: Any) -> None:
    """Fail a pending broadcast at once. Gloo has no abort, but an operation that times out closes every connection of
    its group; without this the group's destructor waits for the stalled one."""
    options = _from_publisher()
    options.timeout = timedelta(milliseconds=1)
    poison = group.broadcast([torch.zeros(1, dtype=torch.uint8)], options)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline and not (work.is_completed() and poison.is_completed()):
        time.sleep(POLL_S)


def _from_publisher() -> Any:
    options = BroadcastOptions()
    options.rootRank = PUBLISHER_RANK
    options.rootTensor = 0
    return options


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def named_tensors(
    manifest: weights_pb2.WeightManifest, buckets: Sequence[NDArray[np.uint8]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Views into the buckets, in the manifest's order. Valid as long as the buckets are."""
    for spec in manifest.tensors:
        raw = torch.from_numpy(buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes])
        yield spec.name, raw.view(TORCH_DTYPES[spec.dtype]).reshape(tuple(spec.shape))


class WeightStage:
    """One version being received by a thread of its own: receiving → received, or → failed.

    The thread also computes the checksums, so that what a commit has left to do is to compare them. `failure` is one
    line and set exactly when the phase is failed."""

    def __init__(self, request: StageRequest) -> None:
        self.manifest = request.manifest
        self.done: Future[None] = Future()
        """Resolved when the phase is no longer receiving, whatever it is then."""
        self.phase: Phase = "receiving"
        self.failure = ""
        self.receive_s = 0.0
        self._request = request
        self._aborted = threading.Event()
        self._buckets: list[NDArray[np.uint8]] = []
        self._checksums: list[str] = []
        self._thread = threading.Thread(target=self._run, name=f"stage-{self.manifest.policy_version}", daemon=True)

    def start(self) -> None:
        self.done.set_running_or_notify_cancel()
        self._thread.start()

    def abort(self) -> None:
        """Make the thread end soon; does not wait for it."""
        self._aborted.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def mismatch(self, expected: Sequence[str]) -> str:
        """Why the received buckets are not the announced ones; empty when they are."""
        if len(expected) != len(self._checksums):
            return f"{len(self._checksums)} buckets were received but {len(expected)} checksums announced"
        for index, (found, wanted) in enumerate(zip(self._checksums, expected, strict=True)):
            if found != wanted:
                return f"bucket {index} is corrupt: checksum {found}, expected {wanted}"
        return ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.phase == "received"
        return named_tensors(self.manifest, self._buckets)

    def _run(self) -> None:
        started = time.monotonic()
        try:
            self._buckets = self._receive()
            self._checksums = [checksum(bucket) for bucket in self._buckets]
            self.receive_s = time.monotonic() - started
            self.phase = "received"
        except Exception as error:
            self.failure = _first_line(error)
            self.phase = "failed"
        finally:
            self.done.set_result(None)

    def _receive(self) -> list[NDArray[np.uint8]]:
        request = self._request
        if request.transport == "gloo":
            return receive_gloo(
                request.manifest,
                request.rendezvous,
                request.rank,
                request.world_size,
                request.timeout_s,
                aborted=self._aborted,
            )
        if request.transport == "snapshot":
            return receive_snapshot(request.manifest, Path(request.rendezvous))
        raise WeightPushFailed(f"unknown transport {request.transport!r}; this engine knows gloo and snapshot")
