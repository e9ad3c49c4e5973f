"""What both ends of a weight push agree on: how weights are sent, which bytes, and within which time.
The learner has a sender for each transport, the rollout server a receiver.

| name     | how weights are sent                       | needs                                                        |
|----------|--------------------------------------------|--------------------------------------------------------------|
| nccl     | NCCL broadcast (CuPy), GPU to GPU          | CuPy; a separate GPU for the publisher and for each worker   |
| cuda_ipc | one copy inside a GPU                      | CuPy; publisher and worker on the same GPU of one host       |
| shm      | sealed shared memory, mapped without copy  | publisher and worker on one host, one user, one pid namespace|
| gloo     | TCP broadcast through host memory          | a network                                                    |
| snapshot | a safetensors file                         | a volume that both sides mount                               |

The layout of buckets: tensors are packed into buckets of at most `bucket_bytes`, in the given order. A larger tensor
gets its own bucket. Each tensor is aligned to 16 bytes and lies inside one bucket. The manifest describes the layout
completely.

Checksums detect torn, reordered and corrupted transfers. They do not protect against attackers.

| name        | fast in     | definition                                                                 |
|-------------|-------------|----------------------------------------------------------------------------|
| xxh3_pieces | host memory | xxh3_128 over the xxh3_128 digests of the bucket's pieces of 1 MiB         |
| mix64       | GPU memory  | sum over the words i of splitmix64(word[i] + (i + 1) * 2^64/phi), mod 2^64 |

The publisher uses xxh3_pieces for host memory, because several threads can hash the pieces of a bucket: on many ARM
processors one thread hashes no faster than another one copies. mix64 is a sum in any order, so a GPU computes it at the
speed of its memory (`device_mix64` in cuda.py).

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

Every wait of a transfer has a `Deadline`, which an abort can end early.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.folder_tensors import is_head

TRANSPORTS = ("nccl", "cuda_ipc", "shm", "gloo", "snapshot")
"""In the order in which `auto` prefers them."""
PUBLISHER_RANK = 0
"""Rank of the publisher in every collective. The members' workers are 1, 2, …"""


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


# ── the layout of buckets ──

ALIGNMENT = 16
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1}
A_SUFFIX, B_SUFFIX = ".lora_A", ".lora_B"
"""The names of an adapter's two matrices are the weight's name with these suffixes."""


@dataclass(frozen=True)
class TensorShape:
    name: str
    dtype: str
    """Name of the type in safetensors, such as BF16."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * ITEM_BYTES[self.dtype]


def build_manifest(
    run: str, policy_version: int, term: int, tensors: Iterable[TensorShape], bucket_bytes: int
) -> weights_pb2.WeightManifest:
    """Lay out the tensors. The checksums come with the commit, when every bucket has been gathered."""
    manifest = weights_pb2.WeightManifest(run=run, policy_version=policy_version, term=term, checksum=XXH3_PIECES)
    used = 0
    for tensor in tensors:
        padded = -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        if not manifest.buckets or used + padded > bucket_bytes:
            manifest.buckets.add()
            used = 0
        manifest.tensors.add(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            bucket=len(manifest.buckets) - 1,
            offset_bytes=used,
            num_bytes=tensor.num_bytes,
        )
        used += padded
        manifest.buckets[-1].num_bytes = used
    return manifest


def check_manifest(manifest: weights_pb2.WeightManifest, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise WeightPushFailed unless the push has exactly the tensors of the model, whose shapes are given.

    Without this check a push that does not match would fail in the middle of its load. A push may contain a tied head,
    although `shapes` does not."""
    _check_layout(manifest)
    pushed = {spec.name: tuple(spec.shape) for spec in manifest.tensors}
    if manifest.HasField("adapter"):
        check_adapter(pushed, shapes)
        return
    if missing := sorted(shapes.keys() - pushed.keys()):
        raise WeightPushFailed(f"the push lacks {len(missing)} tensors of the model, the first is {missing[0]}")
    if unknown := sorted(name for name in pushed.keys() - shapes.keys() if not is_head(name)):
        raise WeightPushFailed(f"the push has {len(unknown)} tensors the model lacks, the first is {unknown[0]}")
    for name, shape in pushed.items():
        if shapes.get(name, shape) != shape:
            raise WeightPushFailed(f"{name} has shape {shape} in the push and {shapes[name]} in the model")


def _check_layout(manifest: weights_pb2.WeightManifest) -> None:
    """Raise WeightPushFailed unless each tensor has the size of its shape and lies inside its bucket."""
    for spec in manifest.tensors:
        shape = tuple(spec.shape)
        if spec.dtype not in ITEM_BYTES or spec.num_bytes != TensorShape(spec.name, spec.dtype, shape).num_bytes:
            raise WeightPushFailed(f"{spec.name} is not {spec.num_bytes} bytes of {spec.dtype}")
        if not 0 <= spec.bucket < len(manifest.buckets):
            raise WeightPushFailed(f"{spec.name} is in bucket {spec.bucket}, but there are {len(manifest.buckets)}")
        if spec.offset_bytes < 0 or spec.offset_bytes + spec.num_bytes > manifest.buckets[spec.bucket].num_bytes:
            raise WeightPushFailed(f"{spec.name} does not lie inside its bucket")


def check_adapter(adapter: dict[str, tuple[int, ...]], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise WeightPushFailed unless each lora_A and lora_B form a pair that matches a weight of the model."""
    names = {name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in adapter}
    for name in sorted(names):
        low, up = adapter.get(name + A_SUFFIX), adapter.get(name + B_SUFFIX)
        if low is None or up is None:
            raise WeightPushFailed(f"the adapter has only one of lora_A and lora_B for {name}")
        if name not in shapes:
            raise WeightPushFailed(f"the adapter changes {name}, which the model does not have")
        if min(len(low), len(up)) < 2 or low[:-1] != (*up[:-2], up[-1]) or (*up[:-1], low[-1]) != shapes[name]:
            raise WeightPushFailed(f"lora_B {up} @ lora_A {low} does not match {name} of shape {shapes[name]}")


def wire_sizes(manifest: weights_pb2.WeightManifest) -> list[int]:
    """Return the number of bytes sent for each bucket: the size of its delta, or of the whole bucket."""
    return [bucket.wire_bytes or bucket.num_bytes for bucket in manifest.buckets]


def bucket_offsets(sizes: Iterable[int], alignment: int) -> list[int]:
    """Return the offset of each bucket in one block of memory, aligned, and the offset after the last bucket."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // alignment) * alignment)
    return offsets


def item_bytes(manifest: weights_pb2.WeightManifest) -> int:
    """Return the size of the items that a delta consists of: that of the smallest dtype in the manifest."""
    return min(ITEM_BYTES[dtype] for dtype in {spec.dtype for spec in manifest.tensors})


# ── checksums ──

XXH3_PIECES = "xxh3_pieces"
MIX64 = "mix64"
CHECKSUM_PIECE_BYTES = 2**20
"""Size of the pieces of xxh3_pieces."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_WORDS = 2**20


class RunningChecksum:
    """The checksum of a bucket in host memory, updated piece by piece as the pieces are copied or arrive.

    A piece that has just been written is still in the processor's cache. Hashing it there costs a quarter of what it
    costs from memory. The size of every piece except the last must be a multiple of 8 bytes."""

    def __init__(self, name: str) -> None:
        if name not in (XXH3_PIECES, MIX64):
            raise WeightPushFailed(f"unknown checksum {name!r}; learner and rollout server must have the same version")
        self._name = name
        self._xxh3 = xxhash.xxh3_128()
        self._digests: list[bytes] = []
        self._num_in_piece = 0
        self._mix64 = 0
        self._num_words = 0

    def update(self, piece: NDArray[np.uint8]) -> None:
        if self._name == XXH3_PIECES:
            self._update_pieces(piece)
            return
        words = piece.view(np.uint64)
        self._mix64 = (self._mix64 + _mix64(words, self._num_words)) % 2**64
        self._num_words += len(words)

    def _update_pieces(self, piece: NDArray[np.uint8]) -> None:
        while len(piece):
            part = piece[: CHECKSUM_PIECE_BYTES - self._num_in_piece]
            self._xxh3.update(part.data)
            self._num_in_piece += len(part)
            piece = piece[len(part) :]
            if self._num_in_piece == CHECKSUM_PIECE_BYTES:
                self._digests.append(self._xxh3.digest())
                self._xxh3, self._num_in_piece = xxhash.xxh3_128(), 0

    @property
    def value(self) -> str:
        if self._name == XXH3_PIECES:
            return combined_digests([*self._digests, self._xxh3.digest()] if self._num_in_piece else self._digests)
        return f"{self._mix64:016x}"


def piece_digest(piece: NDArray[np.uint8]) -> bytes:
    """Return the digest of one piece of xxh3_pieces. Other threads run meanwhile."""
    return xxhash.xxh3_128_digest(piece.data)


def combined_digests(digests: Sequence[bytes]) -> str:
    """Return the value of xxh3_pieces, from the digests of all pieces in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def host_checksum(name: str, bucket: NDArray[np.uint8]) -> str:
    checksum = RunningChecksum(name)
    checksum.update(bucket)
    return checksum.value


def weights_digest(bucket_checksums: Sequence[str]) -> str:
    """Combine the bucket checksums of a version into one digest, which is equal only if every byte is equal."""
    return xxhash.xxh3_128_hexdigest("".join(bucket_checksums).encode())


def _mix64(words: NDArray[np.uint64], num_before: int) -> int:
    """Return the part of the sum that these words contribute. `num_before` words come before them."""
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for start in range(0, len(words), _CHUNK_WORDS):
            chunk = words[start : start + _CHUNK_WORDS]
            first = num_before + start + 1
            index = np.arange(first, first + len(chunk), dtype=np.uint64)
            total += _splitmix64(chunk + index * _GOLDEN).sum(dtype=np.uint64)
    return int(total)


def _splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


# ── gloo's relays ──

GLOO_PIECE_BYTES = 4 * 2**20
"""Size of the pieces in which a bucket is sent. The receiver hashes each while it is in the processor's cache."""
GLOO_PIECES_AT_ONCE = 8
"""Number of pieces that are in flight at once."""


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


# ── the header of shm ──

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

    def half(self) -> Deadline:
        """A deadline for a wait that must leave time for what follows it: half of the time that is left."""
        return Deadline(self.remaining_s / 2, self._activity, self._aborted)

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
