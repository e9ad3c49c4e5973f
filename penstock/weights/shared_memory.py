"""How a version lies in shared memory: its buckets, each at a page's start, then a header.

The header is `run`, `term`, `policy_version` and the checksums, as JSON. It is written when the buckets are complete
and hashed, and cleared before they are written again: members wait until it names the version they were announced. The
pages are the very ones that the publisher hashed, and the kernel lets nobody else write to them, so members compare
the header's checksums and do not hash again.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence

from penstock.v1 import weights_pb2

F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1: no new writer, while the publisher's own mapping stays. Not named by Python's fcntl yet."""
SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_IDENTITY_BYTES = 1024
_BYTES_A_CHECKSUM = 40


def header_bytes(num_buckets: int) -> int:
    return _IDENTITY_BYTES + num_buckets * _BYTES_A_CHECKSUM


def make_header(manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> bytes:
    return json.dumps([*_identity(manifest), list(checksums)]).encode()


def read_header(header: bytes, manifest: weights_pb2.WeightManifest) -> list[str] | None:
    """The checksums; None while the memory does not hold the version of the manifest."""
    try:
        *identity, checksums = json.loads(header.rstrip(b"\0"))
    except ValueError:
        return None
    return [str(checksum) for checksum in checksums] if identity == _identity(manifest) else None


def _identity(manifest: weights_pb2.WeightManifest) -> list[str | int]:
    return [manifest.run, manifest.term, manifest.policy_version]
