"""A version that is being gathered. The training thread fills it bucket by bucket while the push reads it."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from penstock.errors import TrainingDiverged, first_line_of
from penstock.v1 import weights_pb2
from penstock.weights import cuda
from penstock.weights.cuda import BUCKET_ALIGNMENT, IPC_HEADER, DeviceAllocation, DeviceStream, identity
from penstock.weights.transports import (
    CHECKSUM_PIECE_BYTES,
    MIX64,
    SEALS,
    XXH3_PIECES,
    Deadline,
    bucket_offsets,
    combined_digests,
    has_cupy,
    header_bytes,
    make_header,
    piece_digest,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
COPY_BYTES = 2**18
"""Size of the parts in which a weight is copied. A part that the same thread hashes is still in its cache."""
NUM_HASHING_THREADS = 2
"""Threads that help the training thread to hash, which on many ARM processors is slower than copying."""


class StagedVersion:
    """The buckets of one version: first filling, then complete, then sealed, or refused if a number is not finite. Call
    `put` in the manifest's order. A bucket may be sent as soon as its last tensor was put."""

    def __init__(self, manifest: weights_pb2.WeightManifest, memory: BucketMemory) -> None:
        self.manifest = manifest
        self.memory = memory
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._of_bucket: dict[int, list[weights_pb2.TensorSpec]] = {}
        for spec in manifest.tensors:
            self._of_bucket.setdefault(spec.bucket, []).append(spec)
        self._progress = threading.Condition()
        """Notified when a bucket is filled, and when the version is sealed."""
        self._num_put = 0
        """Buckets whose last tensor was put. The GPU may still be copying."""
        self._num_filled = 0
        self.is_sealed = False
        """Whether every bucket is filled and hashed. Sealed buckets no longer change."""
        self.nonfinite = ""
        """Name of a tensor that holds a NaN or an infinity. Such a version is never sealed, so no member commits it."""
        self._pieces = PieceHashing()
        self._has_device_weights = False
        """The GPU copies such weights. The training thread waits for it only if the bucket is in host memory."""
        self._checking = ThreadPoolExecutor(1, thread_name_prefix="check")
        self._checksums: list[Future[str]] = []
        self._last: Future[Any] | None = None
        """The newest task of the checking thread, which does one after another."""

    @property
    def policy_version(self) -> int:
        return self.manifest.policy_version

    @property
    def is_complete(self) -> bool:
        return self._num_filled == len(self.memory.buckets)

    @property
    def is_idle(self) -> bool:
        """Whether the checking thread has nothing to do. A complete version is then sealed or refused."""
        return self._last is None or self._last.done()

    def put(self, name: str, weight: torch.Tensor) -> None:
        """Copy one full weight to its place in a bucket, cast to the type that the manifest says."""
        spec = self._specs[name]
        bucket = self.memory.buckets[spec.bucket]
        view = _view(bucket, [spec]).view(weight.shape)
        if weight.is_cpu and bucket.is_cpu:
            assert not self._has_device_weights, "all weights of a version must come from one kind of memory"
            flat, filled = weight.detach().contiguous().view(-1), bucket.numpy()
            for num_copied in copied_parts(flat, view.view(-1)):
                self._pieces.add(filled[: spec.offset_bytes + num_copied])
        else:
            self._has_device_weights = True
            view.copy_(weight, non_blocking=weight.is_cuda)
        if self._of_bucket[spec.bucket][-1].name == name:
            self._finish_bucket(spec.bucket)

    def bucket(self, index: int, deadline: Deadline) -> torch.Tensor:
        deadline.wait_for(self._progress, lambda: self._num_filled > index)
        return self.memory.buckets[index]

    def checksums(self, deadline: Deadline) -> list[str]:
        """Wait until the version is sealed, and return the checksum of every bucket."""
        self.wait_sealed(deadline)
        return [future.result() for future in self._checksums]

    def wait_sealed(self, deadline: Deadline) -> None:
        """Wait until the version is sealed. Raises TrainingDiverged if it is refused, because it is not finite."""
        deadline.wait_for(self._progress, lambda: self.is_sealed or bool(self.nonfinite))
        if self.nonfinite:
            raise TrainingDiverged(f"version {self.policy_version} is not finite: {self.nonfinite}")

    def _finish_bucket(self, index: int) -> None:
        """Leave a bucket whose last tensor was put to the checking thread. Weights that the GPU copies within its own
        memory may change again at once: kernels that are enqueued from now on run after the copies."""
        assert index == self._num_put, "weights must come in the manifest's order"
        self._num_put += 1
        bucket = self.memory.buckets[index]
        copied = torch.cuda.Event(blocking=True) if self._has_device_weights else None
        if copied is not None:
            copied.record()
        digests: list[Future[bytes]] = []
        if bucket.is_cpu:
            self._wait_filled(copied)
            digests = self._pieces.finish(bucket.numpy())
        checksum = self._checking.submit(self._check_and_hash, index, digests, copied)
        self._checksums.append(checksum)
        self._last = checksum
        if self._num_put == len(self.memory.buckets):
            self._last = self._checking.submit(self._seal)
            self._checking.shutdown(wait=False)
            self._pieces.close()

    def _check_and_hash(self, index: int, digests: list[Future[bytes]], copied: torch.cuda.Event | None) -> str:
        """Return the checksum of a bucket, mix64 on a GPU, else xxh3_pieces of the `digests` of its pieces. Refuse the
        version if a number in the bucket is not finite. Runs in the checking thread, while the training thread fills
        the next bucket. `copied` happens when the GPU has filled this one."""
        bucket = self.memory.buckets[index]
        if not bucket.is_cpu:
            self._wait_filled(copied)
        if name := self._first_nonfinite(index, bucket):
            with self._progress:
                self.nonfinite = self.nonfinite or name
                self._progress.notify_all()
        if bucket.is_cuda:
            return cuda.device_mix64(bucket.data_ptr(), bucket.numel(), bucket.get_device())
        return combined_digests([digest.result() for digest in digests])

    def _wait_filled(self, copied: torch.cuda.Event | None) -> None:
        """Wait until the next bucket is filled, and say so. Without `copied` it is."""
        if copied is not None:
            copied.synchronize()
        with self._progress:
            self._num_filled += 1
            self._progress.notify_all()

    def _first_nonfinite(self, index: int, bucket: torch.Tensor) -> str:
        with on_separate_stream(bucket):
            for _, run in groupby(self._of_bucket[index], key=lambda spec: spec.dtype):
                specs = list(run)
                if not bool(is_finite(_view(bucket, specs))):  # padding is zero
                    return first_nonfinite((spec.name, _view(bucket, [spec])) for spec in specs)
            return ""

    def _seal(self) -> None:
        """Mark the version as final, unless it is refused. This is the last task of the checking thread."""
        checksums = [future.result() for future in self._checksums]
        if self.nonfinite:
            return
        self.memory.seal(self.manifest, checksums)
        with self._progress:
            self.is_sealed = True
            self._progress.notify_all()


def _view(bucket: torch.Tensor, specs: Sequence[weights_pb2.TensorSpec]) -> torch.Tensor:
    """The items of neighbouring tensors of one type, with the padding between them."""
    end = specs[-1].offset_bytes + specs[-1].num_bytes
    return bucket[specs[0].offset_bytes : end].view(DTYPES[specs[0].dtype])


class PieceHashing:
    """Hashes a bucket piece by piece as it is filled, for the checksum xxh3_pieces. An idle hashing thread gets a
    piece; otherwise the training thread hashes it, in parts that it has just copied. So idle cores help, and without
    any nothing is read twice from memory."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_HASHING_THREADS, thread_name_prefix="hash")
        self._digests: list[Future[bytes]] = []
        """Digests of the pieces before `_num_hashed`."""
        self._num_hashed = 0
        self._own: Any = None
        """The hash of the piece at `_num_hashed`, if the training thread computes it."""
        self._is_left = False
        """The piece that begins at `_num_hashed` is left to a hashing thread."""

    def add(self, filled: NDArray[np.uint8]) -> None:
        """Hash what is new in the bucket, of which `filled` is final. Bytes between weights are zero."""
        while self._num_hashed < len(filled):
            piece_end = (self._num_hashed // CHECKSUM_PIECE_BYTES + 1) * CHECKSUM_PIECE_BYTES
            if self._own is None and not self._is_left:
                self._begin_piece()
            if self._is_left:
                if piece_end > len(filled):
                    return
                self._leave(filled[self._num_hashed : piece_end])
                continue
            part = filled[self._num_hashed : piece_end]
            self._own.update(part.data)
            self._num_hashed += len(part)
            if self._num_hashed == piece_end:
                self._end_own()

    def finish(self, bucket: NDArray[np.uint8]) -> list[Future[bytes]]:
        """Hash the rest of the bucket, and return the digests of all its pieces."""
        if self._own is not None:
            piece_end = (self._num_hashed // CHECKSUM_PIECE_BYTES + 1) * CHECKSUM_PIECE_BYTES
            rest = bucket[self._num_hashed : piece_end]
            self._own.update(rest.data)
            self._num_hashed += len(rest)
            self._end_own()
        while self._num_hashed < len(bucket):
            self._leave(bucket[self._num_hashed : self._num_hashed + CHECKSUM_PIECE_BYTES])
        digests, self._digests, self._num_hashed = self._digests, [], 0
        return digests

    def close(self) -> None:
        """End the threads when they have hashed what was left to them."""
        self._threads.shutdown(wait=False)

    def _begin_piece(self) -> None:
        num_busy = sum(not digest.done() for digest in self._digests[-2 * NUM_HASHING_THREADS :])
        self._is_left = num_busy < NUM_HASHING_THREADS
        self._own = None if self._is_left else xxhash.xxh3_128()

    def _leave(self, piece: NDArray[np.uint8]) -> None:
        self._digests.append(self._threads.submit(piece_digest, piece))
        self._num_hashed += len(piece)
        self._is_left = False

    def _end_own(self) -> None:
        digest: Future[bytes] = Future()
        digest.set_result(self._own.digest())
        self._digests.append(digest)
        self._own = None


_stream = cache(torch.cuda.Stream)


@contextmanager
def on_separate_stream(bucket: torch.Tensor) -> Iterator[None]:
    """Use a separate stream for a bucket on a GPU, so that results do not wait for the kernels of training."""
    if not bucket.is_cuda:
        yield
        return
    with torch.cuda.device(bucket.device), torch.cuda.stream(_stream(bucket.device)):
        yield


def copied_parts(weight: torch.Tensor, view: torch.Tensor) -> Iterator[int]:
    """Copy a flat tensor part by part, with a cast if the types differ. Yields the number of bytes copied so far."""
    if weight.dtype == view.dtype:
        # memmove is a third faster than torch's copy. A numpy view would keep FSDP from freeing the weight.
        for start in range(0, view.nbytes, COPY_BYTES):
            num_bytes = min(COPY_BYTES, view.nbytes - start)
            ctypes.memmove(view.data_ptr() + start, weight.data_ptr() + start, num_bytes)
            yield start + num_bytes
        return
    num_items = COPY_BYTES // view.element_size()
    for start in range(0, len(view), num_items):
        part = slice(start, start + num_items)
        view[part].copy_(weight[part])
        yield min(part.stop, len(view)) * view.element_size()


def checksum_name(memory: BucketMemory) -> str:
    return MIX64 if memory.kind == "device" else XXH3_PIECES


logger = logging.getLogger(__name__)
MemoryKind = Literal["host", "shared", "device"]


class BucketMemory:
    """Holds the buckets of one version at a time."""

    kind: MemoryKind
    buckets: list[torch.Tensor]
    is_reusable = True
    """False if a member may still be reading the buckets. Their bytes must then not change."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def clear(self) -> None:
        """Called before the first byte of a version is written."""

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        """Called when every byte is written and hashed."""


class HostBuckets(BucketMemory):
    """Plain host memory, pinned if there is a GPU."""

    kind: MemoryKind = "host"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.buckets = [torch.zeros(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()) for size in sizes]


class SharedBuckets(BucketMemory):
    """One anonymous file in memory, which members on the same host map by its `path`. Kernel seals prevent every other
    process from writing to it. The header names a version only while the buckets hold all of it. The pages live until
    the last mapping is gone, even if the publisher has died. If there is a GPU, they are pinned, because nccl copies
    from them too."""

    kind: MemoryKind = "shared"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        offsets = bucket_offsets(sizes, mmap.PAGESIZE)
        self._header = slice(offsets[-1], offsets[-1] + header_bytes(len(sizes)))
        self._fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, self._header.stop)
        self._mapping = mmap.mmap(self._fd, self._header.stop)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        self.buckets = [
            torch.frombuffer(self._mapping, dtype=torch.uint8, count=size, offset=offset)
            for offset, size in zip(offsets, sizes, strict=False)
        ]
        self._pinned = pin(self.buckets[0].data_ptr(), offsets[-1]) if self.buckets else 0

    @property
    def path(self) -> str:
        """A path that processes of the same user and pid namespace can open."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def clear(self) -> None:
        self._write_header(b"")

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        self._write_header(make_header(manifest, checksums))

    def _write_header(self, header: bytes) -> None:
        num_bytes = self._header.stop - self._header.start
        self._mapping[self._header] = header.ljust(num_bytes, b"\0")

    def __del__(self) -> None:
        if getattr(self, "_pinned", 0) and not sys.is_finalizing():
            cuda.runtime().hostUnregister(self._pinned)
        os.close(self._fd)


def pin(pointer: int, num_bytes: int) -> int:
    """Pin pages, so that a GPU copies from them at full speed. Returns the pointer, or 0 if they stay as they are."""
    if not (has_cupy() and torch.cuda.is_available()):
        return 0
    try:
        cuda.runtime().hostRegister(pointer, num_bytes, 0)
    except RuntimeError as error:
        logger.warning("the buckets stay unpinned, so nccl copies them more slowly: %s", first_line_of(error))
        return 0
    return pointer


class DeviceBuckets(BucketMemory):
    """Buckets in GPU memory that other processes on the same GPU can map: one allocation with the layout of
    penstock/weights/cuda.py. The buckets are views, so they must not outlive this object."""

    kind: MemoryKind = "device"

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        super().__init__(sizes)
        self.device = torch.device(device.type, device.index or 0)
        self.offsets = bucket_offsets(sizes, BUCKET_ALIGNMENT)
        self.allocation = DeviceAllocation(self.offsets[-1] + IPC_HEADER.size, self.device.index)
        self.buckets = [
            bytes_at(self.allocation.pointer + offset, size, self.device)
            for offset, size in zip(self.offsets, sizes, strict=False)
        ]

    def clear(self) -> None:
        """Zero everything. A member that still reads the header must not take the new bytes for the old version's."""
        self.allocation.clear()

    def seal(self, manifest: weights_pb2.WeightManifest, checksums: Sequence[str]) -> None:
        self.mark_ready(manifest, len(self.buckets))

    def mark_ready(self, manifest: weights_pb2.WeightManifest, num_ready: int) -> None:
        """Tell members that the first `num_ready` buckets hold the manifest's version and may be copied."""
        header = np.frombuffer(IPC_HEADER.pack(identity(manifest), num_ready), dtype=np.uint8)
        with closing(DeviceStream(self.allocation.device_index)) as stream:
            stream.copy(self.allocation.pointer + self.offsets[-1], header.ctypes.data, IPC_HEADER.size)
            stream.synchronize()


def device_uuid(device: torch.device) -> str:
    """Return `cpu`, or the UUID of the GPU. Rollout servers name their devices in the same way."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def bytes_at(pointer: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return a view of GPU memory, by the CUDA array interface. The tensor does not own the memory."""
    interface = {
        "shape": (num_bytes,), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None,
        "stream": None,
    }  # fmt: skip
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)


class MemoryPool:
    """Reuses bucket memory, so that the publisher's memory stays the same over many pushes. Copying into pages that
    were used before is several times faster."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: list[BucketMemory] = []

    def take(self, kind: MemoryKind, sizes: Sequence[int]) -> BucketMemory:
        """Return cleared memory with this layout. Free memory with another layout is released."""
        fitting = [memory for memory in self._free if memory.kind == kind and memory.sizes == list(sizes)]
        self._free = fitting[1:]
        memory = fitting[0] if fitting else self._make(kind, sizes)
        memory.clear()
        return memory

    def give_back(self, memory: BucketMemory) -> None:
        """Keep the memory for a later version, unless a member may still read it. GPU memory is always kept: members
        verify their copy, so they notice if it is overwritten, and freeing it would wait for everything that runs on
        the GPU, including a transfer that hangs."""
        if memory.is_reusable or memory.kind == "device":
            self._free.append(memory)

    def _make(self, kind: MemoryKind, sizes: Sequence[int]) -> BucketMemory:
        if kind == "device":
            return DeviceBuckets(sizes, self.device)
        return SharedBuckets(sizes) if kind == "shared" else HostBuckets(sizes)


def first_nonfinite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first tensor that holds a NaN or an infinity, or an empty text. Waits for the device once."""
    checked = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not checked:
        return ""
    finite = torch.stack([is_finite(tensor).to(checked[0][1].device) for _, tensor in checked]).tolist()
    return next((name for (name, _), each in zip(checked, finite, strict=True) if not each), "")


def is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """A boolean on the tensor's device. Smallest and largest value cost a tenth of `isfinite`, and NaN is both."""
    smallest, largest = tensor.detach().aminmax()
    return smallest.isfinite() & largest.isfinite()
