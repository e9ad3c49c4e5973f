"""Snapshots: the weights of one version as a safetensors file, which vLLM and Hugging Face can load.

The file is written under another name, flushed and renamed. So a reader sees a complete snapshot or none.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from penstock.errors import WeightPushFailed
from penstock.machine import written_whole
from penstock.v1 import weights_pb2
from penstock.weights.transports import host_checksum, weights_digest

FILE_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.binpb"


def write_snapshot(
    folder: Path,
    manifest: weights_pb2.WeightManifest,
    buckets: Sequence[NDArray[np.uint8]],
    checksums: Sequence[str],
) -> None:
    """Write the weights durably. The manifest is written first, so a folder with weights has a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    snapshot = weights_pb2.SnapshotManifest(
        manifest=manifest, bucket_checksums=checksums, manifest_checksum=_manifest_checksum(manifest)
    )
    (folder / MANIFEST_NAME).write_bytes(snapshot.SerializeToString())
    _write_weights(folder, manifest, buckets)


def read_manifest(folder: Path) -> weights_pb2.SnapshotManifest:
    """Read the manifest that `write_snapshot` wrote. Raises WeightPushFailed if there is no complete snapshot."""
    try:
        if not (folder / FILE_NAME).is_file():
            raise FileNotFoundError
        snapshot: weights_pb2.SnapshotManifest = weights_pb2.SnapshotManifest.FromString(
            (folder / MANIFEST_NAME).read_bytes()
        )
    except (OSError, DecodeError) as error:
        raise WeightPushFailed(f"{folder} contains no snapshot; it was retired, or the volume is not shared") from error
    return snapshot


def read_published_manifest(folder: Path, expected_digest: str) -> weights_pb2.SnapshotManifest:
    """Read the manifest of a snapshot. Raises WeightPushFailed if it is damaged or is not the published one.

    `expected_digest` is the digest in the version's record."""
    snapshot = read_manifest(folder)
    digest = weights_digest(snapshot.bucket_checksums)
    if digest != expected_digest or len(snapshot.bucket_checksums) != len(snapshot.manifest.buckets):
        raise WeightPushFailed(
            f"{folder / MANIFEST_NAME} is damaged or is not the published version: expected digest {expected_digest}, "
            f"found {digest}"
        )
    checksum = _manifest_checksum(snapshot.manifest)
    if snapshot.manifest_checksum != checksum:
        raise WeightPushFailed(
            f"{folder / MANIFEST_NAME} is damaged: expected checksum {snapshot.manifest_checksum}, found {checksum}"
        )
    return snapshot


def _manifest_checksum(manifest: weights_pb2.WeightManifest) -> str:
    return xxhash.xxh3_128_hexdigest(manifest.SerializeToString(deterministic=True))


def _write_weights(folder: Path, manifest: weights_pb2.WeightManifest, buckets: Sequence[NDArray[np.uint8]]) -> None:
    """Write `folder/model.safetensors` in the format of the specification: length of the header, header, bytes."""
    header: dict[str, object] = {"__metadata__": {"policy_version": str(manifest.policy_version), "format": "pt"}}
    offset = 0
    for spec in manifest.tensors:
        end = offset + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with written_whole(folder / FILE_NAME) as partial, partial.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for spec in manifest.tensors:
            file.write(buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes].data)


def read_snapshot(folder: Path, manifest: weights_pb2.WeightManifest) -> Iterator[NDArray[np.uint8]]:
    """Read the tensors into the manifest's buckets, one bucket after the other.

    Raises WeightPushFailed if the file does not match the manifest."""
    path = folder / FILE_NAME
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
            for index, specs in groupby(manifest.tensors, key=lambda spec: spec.bucket):
                bucket = np.zeros(manifest.buckets[index].num_bytes, dtype=np.uint8)
                for spec in specs:
                    _read_tensor(file, 8 + header_bytes, header[spec.name], spec, bucket)
                yield bucket
    except FileNotFoundError as error:
        raise WeightPushFailed(f"{path} is not there; it was retired, or the volume is not shared") from error
    except (KeyError, ValueError, TypeError, IndexError, MemoryError, OverflowError, struct.error) as error:
        raise WeightPushFailed(f"{path} is not a snapshot of this model: {error!r}") from error


def _read_tensor(
    file: BinaryIO, start: int, entry: dict[str, Any], spec: weights_pb2.TensorSpec, bucket: NDArray[np.uint8]
) -> None:
    """Read one tensor to its place in the bucket. The file's tensors begin at `start`."""
    first, end = entry["data_offsets"]
    if entry["dtype"] != spec.dtype or entry["shape"] != list(spec.shape) or end - first != spec.num_bytes:
        raise WeightPushFailed(f"{file.name}: {spec.name} has another dtype or shape than in the manifest")
    file.seek(start + first)
    view = bucket[spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
    if (num_bytes := file.readinto(view.data)) != spec.num_bytes:  # type: ignore[attr-defined]
        raise WeightPushFailed(
            f"{file.name} is truncated: expected {spec.num_bytes} bytes of {spec.name}, found {num_bytes}"
        )


def find_damage(folder: Path, expected_digest: str) -> str:
    """Why a snapshot must not be loaded, or an empty text if every byte is as published."""
    try:
        snapshot = read_published_manifest(folder, expected_digest)
        for index, bucket in enumerate(read_snapshot(folder, snapshot.manifest)):
            found, expected = host_checksum(snapshot.manifest.checksum, bucket), snapshot.bucket_checksums[index]
            if found != expected:
                return f"{folder / FILE_NAME} is damaged: expected checksum {expected} of bucket {index}, found {found}"
    except WeightPushFailed as error:
        return str(error)
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror or error}"
    return ""
