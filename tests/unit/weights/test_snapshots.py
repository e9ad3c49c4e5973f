"""A damaged snapshot is never loaded, whichever file is damaged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.snapshot import (
    FILE_NAME,
    MANIFEST_NAME,
    find_damage,
    read_published_manifest,
    read_snapshot,
    write_snapshot,
)
from penstock.weights.transports import (
    XXH3_PIECES,
    TensorShape,
    build_manifest,
    host_checksum,
    weights_digest,
)
from support.weight_buckets import allocate_buckets


@pytest.fixture
def snapshot(tmp_path: Path) -> tuple[Path, str, list[bytes]]:
    """A snapshot of an adapter in two buckets, its digest, and the bytes of its buckets."""
    shapes = [TensorShape(name, "F32", (5, 3)) for name in ("a", "b", "c")]
    manifest = build_manifest("run", 7, 1, shapes, bucket_bytes=128)
    manifest.adapter.scale = 2.0
    buckets = allocate_buckets(manifest)
    random = np.random.default_rng(0)
    for spec in manifest.tensors:
        numbers = random.normal(size=15).astype(np.float32).view(np.uint8)
        buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes] = numbers
    checksums = [host_checksum(XXH3_PIECES, bucket) for bucket in buckets]
    write_snapshot(tmp_path / "good", manifest, buckets, checksums)
    return tmp_path / "good", weights_digest(checksums), [bucket.tobytes() for bucket in buckets]


def is_loaded_incorrectly(folder: Path, digest: str, expected: list[bytes]) -> bool:
    """Whether a server would commit other weights, or other settings of an adapter, than were published."""
    try:
        kept = read_published_manifest(folder, digest)
        buckets = list(read_snapshot(folder, kept.manifest))
    except (WeightPushFailed, OSError):
        return False
    found = [host_checksum(kept.manifest.checksum, bucket) for bucket in buckets]
    if found != list(kept.bucket_checksums):
        return False
    return [bucket.tobytes() for bucket in buckets] != expected or kept.manifest.adapter.scale != 2.0


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("name", [FILE_NAME, MANIFEST_NAME])
def test_every_flipped_byte_and_every_truncation_is_found(
    name: str, snapshot: tuple[Path, str, list[bytes]], tmp_path: Path
) -> None:
    good, digest, expected = snapshot
    assert find_damage(good, digest) == ""
    content = (good / name).read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little") if name == FILE_NAME else 0
    flipped = [content[:i] + bytes([content[i] ^ 0x10]) + content[i + 1 :] for i in range(len(content))]
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    for index, damaged in enumerate([*flipped, *(damage(content) for damage in DAMAGES.values())]):
        (copy / name).write_bytes(damaged)
        found = find_damage(copy, digest)
        assert "\n" not in found
        # A flip in the header of the file may change a comment or white space, which no reader uses.
        assert found or index < header_bytes, (name, index)
        assert not is_loaded_incorrectly(copy, digest, expected), (name, index)


def test_the_line_names_the_file_and_both_checksums(snapshot: tuple[Path, str, list[bytes]]) -> None:
    good, digest, _ = snapshot
    content = bytearray((good / FILE_NAME).read_bytes())
    content[-1] ^= 1
    (good / FILE_NAME).write_bytes(content)
    assert f"{good / FILE_NAME} is damaged: expected checksum " in find_damage(good, digest)
    (good / FILE_NAME).write_bytes(content[:-4])
    assert f"{good / FILE_NAME} is truncated: expected 60 bytes of c, found 56" == find_damage(good, digest)


def test_a_manifest_without_its_checksum_or_of_another_version_is_refused(
    snapshot: tuple[Path, str, list[bytes]],
) -> None:
    good, digest, _ = snapshot
    kept = weights_pb2.SnapshotManifest.FromString((good / MANIFEST_NAME).read_bytes())
    kept.manifest_checksum = ""
    (good / MANIFEST_NAME).write_bytes(kept.SerializeToString())
    assert f"{good / MANIFEST_NAME} is damaged: expected checksum" in find_damage(good, digest)
    assert "is not the published version" in find_damage(good, "another digest")
