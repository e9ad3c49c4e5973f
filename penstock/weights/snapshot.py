"""Snapshots: one version's weights as a safetensors file that vLLM and Hugging Face load too.

A snapshot is written aside, flushed and renamed, so a reader sees a whole one or none.
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
    """Write the weights durably, and the manifest first: where there are weights there is a manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = weights_pb2.SnapshotManifest(manifest=manifest, bucket_checksums=checksums)
    (folder / MANIFEST_NAME).write_bytes(kept.SerializeToString())
    _write_weights(folder, manifest, buckets)


def read_manifest(folder: Path) -> weights_pb2.SnapshotManifest:
    """What `write_snapshot` noted. Raises WeightPushFailed where no whole snapshot is."""
    try:
        if not (folder / FILE_NAME).is_file():
            raise FileNotFoundError
        kept: weights_pb2.SnapshotManifest = weights_pb2.SnapshotManifest.FromString(
            (folder / MANIFEST_NAME).read_bytes()
        )
    except (OSError, DecodeError) as error:
        raise WeightPushFailed(f"{folder} holds no snapshot; it was retired, or the volume is not shared") from error
    return kept


def _write_weights(folder: Path, manifest: weights_pb2.WeightManifest, buckets: Sequence[NDArray[np.uint8]]) -> None:
    """`folder/model.safetensors`. The layout is the safetensors specification's: length, JSON, bytes."""
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
    """Read the tensors of `manifest` into its bucket layout; raises WeightPushFailed when the file does not fit it."""
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
                    raise WeightPushFailed(f"{path}: {spec.name} has another dtype or shape than the manifest says")
                file.seek(8 + header_bytes + start)
                view = buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
                if file.readinto(view.data) != spec.num_bytes:
                    raise WeightPushFailed(f"{path} ends in the middle of {spec.name}")
    except FileNotFoundError as error:
        raise WeightPushFailed(f"{path} is not there; it was retired, or the volume is not shared") from error
    except (KeyError, ValueError, struct.error) as error:
        raise WeightPushFailed(f"{path} is not a snapshot of this model: {error!r}") from error
    return buckets
