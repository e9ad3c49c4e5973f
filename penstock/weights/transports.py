"""The weight transports, and what both ends of one have to agree on. The learner has a sender, the server a receiver.

| name     | how weights are sent                       | needs                                                        |
|----------|--------------------------------------------|--------------------------------------------------------------|
| nccl     | NCCL broadcast (CuPy), GPU to GPU          | CuPy; a separate GPU for the publisher and for each worker   |
| cuda_ipc | one copy inside a GPU                      | CuPy; publisher and worker on the same GPU of one host       |
| shm      | sealed shared memory, mapped without copy  | publisher and worker on one host, one user, one pid namespace|
| gloo     | TCP broadcast through host memory          | a network                                                    |
| snapshot | a safetensors file                         | a volume that both sides mount                               |

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

import functools
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter, ValidationError

from penstock.errors import WeightPushFailed
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
