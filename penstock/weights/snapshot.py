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
from numpy.typing import NDArray

from penstock.errors import WeightPushFailed
from penstock.v1 import weights_pb2
from penstock.weights.manifest import allocate_buckets

FILE_NAME = "model.safetensors"


def write_snapshot(folder: Path, manifest: weights_pb2.WeightManifest, buckets: Sequence[NDArray[np.uint8]]) -> None:
    """Write `folder/model.safetensors` durably. The layout is the safetensors specification's: length, JSON, bytes."""
    header: dict[str, object] = {"__metadata__": {"policy_version": str(manifest.policy_version), "format": "pt"}}
    offset = 0
    for spec in manifest.tensors:
        end = offset + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    folder.mkdir(parents=True, exist_ok=True)
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
