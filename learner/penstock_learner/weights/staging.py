"""A version being gathered: filled bucket by bucket by the training thread, read bucket by bucket by the push."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from penstock.v1 import weights_pb2
from penstock.weights.checksums import MIX64, XXH3, host_checksum
from penstock.weights.patience import Patience
from penstock_learner.weights.memory import BucketMemory

STAGED_POLL_S = 0.001


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
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._checksums: list[Future[str]] = []

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Copy one whole weight to its place, cast to the engine's type."""
        spec = self._specs[name]
        view = self.memory.buckets[spec.bucket][spec.offset_bytes : spec.offset_bytes + spec.num_bytes]
        view.view(self._dtype).view(weight.shape).copy_(weight, non_blocking=True)
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

    def _finish_bucket(self, index: int) -> None:
        assert index == self._num_filled, "weights come in the manifest's order"
        bucket = self.memory.buckets[index]
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._checksums.append(self._hashing.submit(staged_checksum, bucket))
        self._num_filled += 1
        if self._num_filled == len(self.memory.buckets):
            self.complete.set()
            self._hashing.submit(self._seal)
            self._hashing.shutdown(wait=False)

    def _seal(self) -> None:
        """The last task of the hashing thread."""
        self.memory.seal(self.manifest, [future.result() for future in self._checksums])
        self.sealed.set()


def checksum_name(memory: BucketMemory) -> str:
    return MIX64 if memory.kind == "device" else XXH3


def staged_checksum(bucket: torch.Tensor) -> str:
    """By the checksum that is fast where the bucket lies."""
    if bucket.is_cuda:
        from penstock.weights.cuda.mix64 import device_mix64

        return device_mix64(bucket.data_ptr(), bucket.numel(), bucket.get_device())
    return host_checksum(XXH3, bucket.numpy())
