"""A version that is being gathered. The training thread fills it bucket by bucket while the push reads it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.errors import TrainingDiverged
from penstock.v1 import weights_pb2
from penstock.weights.checksums import MIX64, XXH3, RunningChecksum
from penstock.weights.deadline import Deadline
from penstock.weights.manifest import ALIGNMENT
from penstock_learner.model.finite import first_nonfinite, is_finite
from penstock_learner.weights.memory import BucketMemory

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PIECE_BYTES = 2**18
"""Size of the pieces that are copied, and hashed while they are still in the processor's cache."""


class StagedVersion:
    """The buckets of one version: first filling, then complete, then sealed, or refused if a number is not finite.

    Call `put` in the manifest's order. A bucket may be sent as soon as its last tensor was put."""

    def __init__(self, manifest: weights_pb2.WeightManifest, memory: BucketMemory) -> None:
        self.manifest = manifest
        self.memory = memory
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._of_bucket: dict[int, list[weights_pb2.TensorSpec]] = {}
        for spec in manifest.tensors:
            self._of_bucket.setdefault(spec.bucket, []).append(spec)
        self._progress = threading.Condition()
        """Notified when a bucket is filled, and when the version is sealed."""
        self._num_filled = 0
        self._is_sealed = False
        self.nonfinite = ""
        """Name of a tensor that holds a NaN or an infinity. Such a version is never sealed, so no member commits it."""
        self._checksum = RunningChecksum(XXH3)
        """Checksum of the first `_num_hashed` bytes of the bucket that is being filled."""
        self._num_hashed = 0
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._checksums: list[Future[str]] = []

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    @property
    def is_complete(self) -> bool:
        """Whether every bucket is filled."""
        return self._num_filled == len(self.memory.buckets)

    @property
    def is_sealed(self) -> bool:
        """Whether every bucket is filled and hashed. Sealed buckets no longer change."""
        return self._is_sealed

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Copy one full weight to its place in a bucket, cast to the type that the manifest says."""
        spec = self._specs[name]
        bucket = self.memory.buckets[spec.bucket]
        view = _view(bucket, [spec]).view(weight.shape)
        if weight.is_cpu and bucket.is_cpu:
            flat = weight.detach().contiguous().view(-1)
            self._copy_and_hash(flat, view.view(-1), bucket.numpy(), spec.offset_bytes)
        else:
            view.copy_(weight, non_blocking=True)
        if self._of_bucket[spec.bucket][-1].name == name:
            self._finish_bucket(spec.bucket)

    def bucket(self, index: int, deadline: Deadline) -> torch.Tensor:
        """Wait until the bucket is filled, and return it."""
        deadline.wait_for(self._progress, lambda: self._num_filled > index)
        return self.memory.buckets[index]

    def checksums(self, deadline: Deadline) -> list[str]:
        """Wait until the version is sealed, and return the checksum of every bucket."""
        self.wait_sealed(deadline)
        return [future.result() for future in self._checksums]

    def wait_sealed(self, deadline: Deadline) -> None:
        """Wait until the version is sealed. Raises TrainingDiverged if it is refused, because it is not finite."""
        deadline.wait_for(self._progress, lambda: self._is_sealed or bool(self.nonfinite))
        if self.nonfinite:
            raise TrainingDiverged(f"version {self.policy_version} is not finite: {self.nonfinite}")

    def _copy_and_hash(
        self, weight: torch.Tensor, view: torch.Tensor, bucket: NDArray[np.uint8], offset_bytes: int
    ) -> None:
        """Copy piece by piece, and hash each piece. Bytes before the weight that are not hashed yet are padding."""
        assert offset_bytes - self._num_hashed < ALIGNMENT, "all weights of a version must come from one kind of memory"
        for num_copied in copied_pieces(weight, view):
            self._checksum.update(bucket[self._num_hashed : offset_bytes + num_copied])
            self._num_hashed = offset_bytes + num_copied

    def _finish_bucket(self, index: int) -> None:
        assert index == self._num_filled, "weights must come in the manifest's order"
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self._checksums.append(self._hashing.submit(self._hash_and_check, index, self._checksum, self._num_hashed))
        self._checksum, self._num_hashed = RunningChecksum(XXH3), 0
        with self._progress:
            self._num_filled += 1
            self._progress.notify_all()
        if self.is_complete:
            self._hashing.submit(self._seal)
            self._hashing.shutdown(wait=False)

    def _hash_and_check(self, index: int, checksum: RunningChecksum, num_hashed: int) -> str:
        """Return the checksum of a bucket, and refuse the version if a number in it is not finite.

        Runs in the hashing thread, while the training thread fills the next bucket."""
        bucket = self.memory.buckets[index]
        if name := self._first_nonfinite(index, bucket):
            with self._progress:
                self.nonfinite = self.nonfinite or name
                self._progress.notify_all()
        return staged_checksum(bucket, checksum, num_hashed)

    def _first_nonfinite(self, index: int, bucket: torch.Tensor) -> str:
        """The name of a tensor in the bucket that is not finite, or an empty text."""
        with beside_training(bucket):
            for _, run in groupby(self._of_bucket[index], key=lambda spec: spec.dtype):
                specs = list(run)
                if not bool(is_finite(_view(bucket, specs))):  # padding is zero
                    return first_nonfinite((spec.name, _view(bucket, [spec])) for spec in specs)
            return ""

    def _seal(self) -> None:
        """Mark the version as final, unless it is refused. This is the last task of the hashing thread."""
        checksums = [future.result() for future in self._checksums]
        if self.nonfinite:
            return
        self.memory.seal(self.manifest, checksums)
        with self._progress:
            self._is_sealed = True
            self._progress.notify_all()


def _view(bucket: torch.Tensor, specs: Sequence[weights_pb2.TensorSpec]) -> torch.Tensor:
    """The items of neighbouring tensors of one type, with the padding between them."""
    end = specs[-1].offset_bytes + specs[-1].num_bytes
    return bucket[specs[0].offset_bytes : end].view(DTYPES[specs[0].dtype])


@contextmanager
def beside_training(bucket: torch.Tensor) -> Iterator[None]:
    """Use a stream of its own for a bucket on a GPU, so that results do not wait for the kernels of training."""
    if not bucket.is_cuda:
        yield
        return
    with torch.cuda.device(bucket.device), torch.cuda.stream(_stream(bucket.device)):
        yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def copied_pieces(weight: torch.Tensor, view: torch.Tensor) -> Iterator[int]:
    """Copy a flat tensor piece by piece, with a cast if the types differ. Yields the number of bytes copied so far."""
    if weight.dtype == view.dtype:
        # memmove is a third faster than torch's copy. A numpy view would keep FSDP from freeing the weight.
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
    """Return a bucket's checksum: mix64 on a GPU, else `checksum` continued over the bytes from `num_hashed` on."""
    if bucket.is_cuda:
        from penstock.weights.cuda.mix64 import device_mix64

        return device_mix64(bucket.data_ptr(), bucket.numel(), bucket.get_device())
    checksum.update(bucket[num_hashed:].numpy())
    return checksum.value
