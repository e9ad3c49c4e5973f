"""A version being gathered: filled bucket by bucket by the training thread, read bucket by bucket by the push."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.v1 import weights_pb2
from penstock.weights.checksums import MIX64, XXH3, RunningChecksum
from penstock.weights.manifest import ALIGNMENT
from penstock.weights.patience import Patience
from penstock_learner.weights.memory import BucketMemory

STAGED_POLL_S = 0.001
PIECE_BYTES = 2**18
"""Copied, then hashed while they are in the processor's cache."""


class StagedVersion:
    """filling → complete. `put` in the manifest's order; a bucket may be sent as soon as its last tensor is in."""

    def __init__(self, manifest: weights_pb2.WeightManifest, memory: BucketMemory, dtype: torch.dtype) -> None:
        self.manifest = manifest
        self.memory = memory
        self.complete = threading.Event()
        """Every bucket is filled."""
        self.sealed = threading.Event()
        """Every bucket is hashed too, and none changes any more."""
        self._dtype = dtype
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._last_in_bucket = {spec.bucket: spec.name for spec in manifest.tensors}
        self._num_filled = 0
        self._checksum = RunningChecksum(XXH3)
        """Of the bucket being filled, over its first `_num_hashed` bytes."""
        self._num_hashed = 0
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._checksums: list[Future[str]] = []

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Copy one whole weight to its place, cast to the engine's type."""
        spec = self._specs[name]
        bucket = self.memory.buckets[spec.bucket]
        view = bucket[spec.offset_bytes : spec.offset_bytes + spec.num_bytes].view(self._dtype).view(weight.shape)
        if weight.is_cpu and bucket.is_cpu:
            flat = weight.detach().contiguous().view(-1)
            self._copy_and_hash(flat, view.view(-1), bucket.numpy(), spec.offset_bytes)
        else:
            view.copy_(weight, non_blocking=True)
        if self._last_in_bucket[spec.bucket] == name:
            self._finish_bucket(spec.bucket)

    def bucket(self, index: int, patience: Patience) -> torch.Tensor:
        """Wait for the bucket and return it."""
        patience.until(lambda: self._num_filled > index, STAGED_POLL_S)
        return self.memory.buckets[index]

    def checksums(self, patience: Patience) -> list[str]:
        """Of every bucket, once all are filled."""
        patience.until(self.sealed.is_set, STAGED_POLL_S)
        return [future.result() for future in self._checksums]

    def _copy_and_hash(
        self, weight: torch.Tensor, view: torch.Tensor, bucket: NDArray[np.uint8], offset_bytes: int
    ) -> None:
        """Piece by piece. What lies before the weight and has not been hashed is padding."""
        assert offset_bytes - self._num_hashed < ALIGNMENT, "all weights of a version come from one kind of memory"
        for num_copied in copied_pieces(weight, view):
            self._checksum.update(bucket[self._num_hashed : offset_bytes + num_copied])
            self._num_hashed = offset_bytes + num_copied

    def _finish_bucket(self, index: int) -> None:
        assert index == self._num_filled, "weights come in the manifest's order"
        bucket = self.memory.buckets[index]
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._checksums.append(self._hashing.submit(staged_checksum, bucket, self._checksum, self._num_hashed))
        self._checksum, self._num_hashed = RunningChecksum(XXH3), 0
        self._num_filled += 1
        if self._num_filled == len(self.memory.buckets):
            self.complete.set()
            self._hashing.submit(self._seal)
            self._hashing.shutdown(wait=False)

    def _seal(self) -> None:
        """The last task of the hashing thread."""
        self.memory.seal(self.manifest, [future.result() for future in self._checksums])
        self.sealed.set()


def copied_pieces(weight: torch.Tensor, view: torch.Tensor) -> Iterator[int]:
    """Copy a flat tensor piece by piece, cast where the types differ. Yields the bytes copied so far."""
    if weight.dtype == view.dtype:
        # A third faster than torch's copy. By address: a numpy view would keep FSDP from freeing what it has gathered.
        for start in range(0, view.nbytes, PIECE_BYTES):
            num_bytes = min(PIECE_BYTES, view.nbytes - start)
            ctypes.memmove(view.data_ptr() + start, weight.data_ptr() + start, num_bytes)
            yield start + num_bytes
        return
    num_items = PIECE_BYTES // view.element_size()
    for start in range(0, len(view), num_items):
        piece = slice(start, start + num_items)
        view[piece].copy_(weight[piece])
        yield min(piece.stop, len(view)) * view.element_size()


def checksum_name(memory: BucketMemory) -> str:
    return MIX64 if memory.kind == "device" else XXH3


def staged_checksum(bucket: torch.Tensor, checksum: RunningChecksum, num_hashed: int) -> str:
    """By the checksum that is fast where the bucket lies; in host memory, the rest of what is hashed up to there."""
    if bucket.is_cuda:
        from penstock.weights.cuda.mix64 import device_mix64

        return device_mix64(bucket.data_ptr(), bucket.numel(), bucket.get_device())
    checksum.update(bucket[num_hashed:].numpy())
    return checksum.value
