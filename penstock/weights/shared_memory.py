"""The layout of a version in shared memory: its buckets, each at the start of a page, then a header.

The header contains run, term, policy version and the checksums, as JSON. The publisher writes it when the buckets are
complete and hashed, and clears it before it writes to them again. Members wait until it names the announced version.
They see the same pages that the publisher hashed, and the kernel lets nobody else write to them. So members compare the
header's checksums and do not hash again.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence

from penstock.v1 import weights_pb2

F_SEAL_FUTURE_WRITE = 0x10
"""Forbids new writers, while the publisher's own mapping stays writable. Linux 5.1; Python's fcntl does not name it."""
SEALS = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
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
