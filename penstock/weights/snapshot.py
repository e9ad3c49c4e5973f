"""Snapshots: the weights of one version as a safetensors file, which vLLM and Hugging Face can load.

The file is written under another name, flushed and renamed. So a reader sees a complete snapshot or none.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.manifest import allocate_buckets

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
    snapshot = weights_pb2.SnapshotManifest(manifest=manifest, bucket_checksums=checksums)
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
    partial = folder / f"{FILE_NAME}.partial"
    with partial.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for spec in manifest.tensors:
            file.write(buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes].data)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(folder / FILE_NAME)


def read_snapshot(folder: Path, manifest: weights_pb2.WeightManifest) -> list[NDArray[np.uint8]]:
    """Read the tensors into the manifest's buckets. Raises WeightPushFailed if the file does not match the manifest."""
    path = folder / FILE_NAME
    buckets = allocate_buckets(manifest)
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
            for spec in manifest.tensors:
                entry = header[spec.name]
                start, end = entry["data_offsets"]
                if entry["dtype"] != spec.dtype or entry["shape"] != list(spec.shape) or end - start != spec.num_bytes:
                    raise WeightPushFailed(f"{path}: {spec.name} has another dtype or shape than in the manifest")
                file.seek(8 + header_bytes + start)
                view = buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
                if file.readinto(view.data) != spec.num_bytes:
                    raise WeightPushFailed(f"{path} ends in the middle of {spec.name}")
    except FileNotFoundError as error:
        raise WeightPushFailed(f"{path} is not there; it was retired, or the volume is not shared") from error
    except (KeyError, ValueError, struct.error) as error:
        raise WeightPushFailed(f"{path} is not a snapshot of this model: {error!r}") from error
    return buckets
