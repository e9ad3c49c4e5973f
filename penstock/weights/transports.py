"""The weight transports, and what both ends of a push agree on: the learner has a sender, the server a receiver.

| name     | how weights are sent                       | needs                                                        |
|----------|--------------------------------------------|--------------------------------------------------------------|
| nccl     | NCCL broadcast (CuPy), GPU to GPU          | CuPy; a separate GPU for the publisher and for each worker   |
| cuda_ipc | one copy inside a GPU                      | CuPy; publisher and worker on the same GPU of one host       |
| shm      | sealed shared memory, mapped without copy  | publisher and worker on one host, one user, one pid namespace|
| gloo     | TCP broadcast through host memory          | a network                                                    |
| snapshot | a safetensors file                         | a volume that both sides mount                               |

Every wait of a transfer has a `Deadline`, which an abort can end early.

The `ClusterKey` protects the internal port of the rollout servers: the learner and the gateway send it with each call.
Every run has one: if the config names no key file, the first process that needs the key makes it in the run's folder.

gloo's relays: the ranks of a gloo group all connect to each other, so a meeting of n ranks costs n² in all. A push to
more than `group_size` workers divides them, so that a large fleet meets quickly. The first worker of each group is its
relay: it receives each piece from the publisher and hands it on to its group at once. Both sides compute the division
from the numbers that an announcement has.

    publisher ──► relay ──► the others of its group
              ──► relay ──► …

The layout of shm: the buckets, each at the start of a page, then a header with run, term, policy version and checksums,
as JSON. The publisher writes the header when the buckets are complete and hashed, and clears it before it writes to
them again. Members wait until it names the announced version. They see the same pages that the publisher hashed, and
the kernel lets no one else write to them. So members compare the header's checksums and do not hash again.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import importlib.util
import json
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from penstock.config.run import RunConfig
from penstock.errors import ConfigError, WeightPushFailed
from penstock.v1 import weights_pb2

TRANSPORTS = ("nccl", "cuda_ipc", "shm", "gloo", "snapshot")
"""In the order in which `auto` prefers them."""
PUBLISHER_RANK = 0
"""Rank of the publisher in every collective. The members' workers are 1, 2, …"""
GLOO_PIECE_BYTES = 4 * 2**20
"""Size of the pieces in which a bucket is sent. The receiver hashes each while it is in the processor's cache."""
GLOO_PIECES_AT_ONCE = 8
"""Number of pieces that are in flight at once."""


@functools.cache
def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


@functools.cache
def host_id() -> str:
    """Return an id that is equal for processes that can map each other's memory: same boot, pid namespace and user.

    Empty where there is no /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return ""
    namespace = Path("/proc/self/ns/pid").readlink()
    return f"{boot.read_text().strip()}/{namespace}/{os.getuid()}"


@dataclass(frozen=True)
class Rendezvous:
    """What the sender of a transport tells its receivers in the announcement."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises WeightPushFailed if the text is not one of `to_json`."""
        kind: Any = cls
        try:
            found: Self = _adapter(kind).validate_json(text)
            return found
        except ValidationError as error:
            raise WeightPushFailed(f"{cls.__name__} cannot be read: {error.errors()[0]['msg']}") from error


@functools.cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Made once: making it takes a quarter of the time in which cuda_ipc moves 4 GB."""
    return TypeAdapter(kind)


@dataclass(frozen=True)
class GroupPlace:
    """The place of a rank in a gloo group. Rank 0 of the group sends, and all others receive."""

    name: str
    rank: int
    num_ranks: int


def is_divided(num_ranks: int, group_size: int) -> bool:
    """Return whether the ranks, with the publisher, meet in more than one group."""
    return num_ranks - 1 > group_size


def group_places(rank: int, num_ranks: int, group_size: int) -> list[GroupPlace]:
    """Return the places of a rank: the one where it receives, or the publisher sends, and for a relay the one where it
    hands on. A relay that is alone has no second place. Sizes of groups differ by one at most."""
    num_workers = num_ranks - 1
    if not is_divided(num_ranks, group_size):
        return [GroupPlace("all", rank, num_ranks)]
    num_groups = -(-num_workers // group_size)
    if rank == 0:
        return [GroupPlace("relays", 0, num_groups + 1)]
    group = (rank * num_groups - 1) // num_workers
    first, after = (number * num_workers // num_groups for number in (group, group + 1))
    own = GroupPlace(f"group-{group}", rank - 1 - first, after - first)
    if own.rank:
        return [own]
    relay = GroupPlace("relays", group + 1, num_groups + 1)
    return [relay, own] if own.num_ranks > 1 else [relay]


SEALS = 0x10 | 0x02 | 0x04
"""F_SEAL_FUTURE_WRITE, which forbids new writers while the publisher's own mapping stays writable (Linux 5.1), with
F_SEAL_SHRINK and F_SEAL_GROW."""
_IDENTITY_BYTES = 1024
_BYTES_PER_CHECKSUM = 40


def header_bytes(num_buckets: int) -> int:
    return _IDENTITY_BYTES + num_buckets * _BYTES_PER_CHECKSUM


def make_header(manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> bytes:
    return json.dumps([*_identity(manifest), list(checksums)]).encode()


def read_header(header: bytes, manifest: weights_pb2.WeightManifest) -> list[str] | None:
    """Return the checksums, or None while the memory does not hold the manifest's version."""
    try:
        *identity, checksums = json.loads(header.rstrip(b"\0"))
    except ValueError:
        return None
    return [str(checksum) for checksum in checksums] if identity == _identity(manifest) else None


def _identity(manifest: weights_pb2.WeightManifest) -> list[str | int]:
    return [manifest.run, manifest.term, manifest.policy_version]


# ── the cluster key ──

KEY_HEADER = "x-penstock-cluster-key"
KEY_FILE_NAME = "cluster.key"
"""Name of the key file in the run's folder."""
NUM_KEY_BYTES = 32


@dataclass(frozen=True)
class ClusterKey:
    """The key of a run. The file is read for each call, so that a replaced key counts at once."""

    file: Path
    may_make: bool
    """Whether a missing file is made. False if the config names the file: then the operator makes it."""

    @classmethod
    def of(cls, config: RunConfig) -> ClusterKey:
        named = config.weights.cluster_key_file
        return cls(named or config.folder / KEY_FILE_NAME, may_make=named is None)

    def check(self) -> None:
        """Raise ConfigError if there is no usable key and none would be made. Makes nothing."""
        if self.file.exists() or not self.may_make:
            self.read()

    def make_if_missing(self) -> None:
        """Make the file, which only its owner can read, if this run makes its own key. Processes that start at the same
        time end up with the same key. Raises ConfigError if there is no usable key."""
        if self.may_make and not self.file.exists():
            try:
                self._make()
            except OSError as error:
                raise ConfigError(f"the cluster key {self.file} cannot be made: {error.strerror}") from error
        self.read()

    def _make(self) -> None:
        """Write the key to another file and link it into place: the link fails if another process was first."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.file.parent, prefix=f".{KEY_FILE_NAME}-") as aside:
            aside.write(secrets.token_hex(NUM_KEY_BYTES))
            aside.flush()
            os.fsync(aside.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(aside.name, self.file)

    def read(self) -> str:
        """Return the key. Raises ConfigError if the file cannot be read or is empty."""
        name = "the cluster key" if self.may_make else "weights.cluster_key_file"
        try:
            key = self.file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{name} {self.file} cannot be read: {error.strerror}") from error
        if not key:
            raise ConfigError(f"{name} {self.file} is empty; write a secret into it")
        return key

    def metadata(self) -> list[tuple[str, str]]:
        """Return the gRPC metadata that carries the key."""
        return [(KEY_HEADER, self.read())]

    def is_in(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether a call's metadata carries the key. The comparison takes constant time."""
        given = next((value for name, value in metadata if name == KEY_HEADER), "")
        given_bytes = given if isinstance(given, bytes) else given.encode()
        return hmac.compare_digest(given_bytes, self.read().encode())


# ── deadlines ──

POLL_S = 0.002
"""Polling interval for things that cannot block with a deadline: CUDA, NCCL, gloo, the memory of another process."""


class Deadline:
    """A point in time, `timeout_s` from now. Error messages name the work by `activity`.

    Every wait of a transfer takes one. The wait raises WeightPushFailed when the time is up or `aborted` is set."""

    def __init__(self, timeout_s: float, activity: str, aborted: threading.Event | None = None) -> None:
        self._ends_at = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._activity = activity
        self._aborted = aborted or threading.Event()

    @property
    def remaining_s(self) -> float:
        """Seconds left, at least 1 ms: the value is handed on as a timeout, which must be positive."""
        return max(self._ends_at - time.monotonic(), 0.001)

    def check(self) -> None:
        """Raise WeightPushFailed if the work was aborted or its time is up."""
        if self._aborted.is_set():
            raise WeightPushFailed(f"{self._activity} was aborted")
        if time.monotonic() > self._ends_at:
            raise WeightPushFailed(f"{self._activity} took longer than {self._timeout_s:g} s; is the other side alive?")

    def sleep(self, interval_s: float = POLL_S) -> None:
        """Check the deadline, then sleep for one polling interval. An abort ends the sleep."""
        self.check()
        self._aborted.wait(interval_s)

    def wait_until(self, is_done: Callable[[], bool], interval_s: float = POLL_S) -> None:
        """Poll until `is_done` returns True."""
        while not is_done():
            self.sleep(interval_s)

    def wait_for(self, condition: threading.Condition, is_done: Callable[[], bool]) -> None:
        """Block until `is_done` returns True; whoever changes its answer notifies `condition`.

        An abort does not end this wait, so use it only with a deadline that has no `aborted` event."""
        with condition:
            while not condition.wait_for(is_done, self.remaining_s):
                self.check()
