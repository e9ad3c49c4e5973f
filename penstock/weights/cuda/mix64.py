"""Compute the mix64 checksum (penstock/weights/manifest.py) of bytes in GPU memory, in one pass."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np

from penstock.errors import WeightPushFailed

LOAD_BYTES = 16
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
KERNEL = "penstock_mix64"
SOURCE = r"""
__device__ __forceinline__ unsigned long long splitmix64(unsigned long long x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

extern "C" __global__ void penstock_mix64(
    const ulonglong2* __restrict__ pairs, unsigned long long num_pairs, unsigned long long* __restrict__ total
) {
    const unsigned long long golden = 0x9E3779B97F4A7C15ULL;
    const unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned long long step = 2 * stride * golden;
    unsigned long long salt = (2 * first + 1) * golden;
    unsigned long long sum = 0;
    #pragma unroll 4
    for (unsigned long long i = first; i < num_pairs; i += stride) {
        const ulonglong2 pair = pairs[i];
        sum += splitmix64(pair.x + salt) + splitmix64(pair.y + salt + golden);
        salt += step;
    }
    for (int offset = 16; offset > 0; offset /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, offset);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(total, sum);
    }
}
"""


def device_mix64(pointer: int, num_bytes: int, device_index: int) -> str:
    """Return the checksum as 16 hex digits. The bytes must be complete. Runs on its own stream and waits for it."""
    if num_bytes % LOAD_BYTES or pointer % LOAD_BYTES:
        raise WeightPushFailed(f"mix64 on a GPU takes multiples of {LOAD_BYTES} bytes, not {num_bytes} at {pointer}")
    return f"{_hasher(device_index).run(pointer, num_bytes):016x}"


class _Hasher:
    """The compiled kernel of one device, with its stream and the memory of its result."""

    def __init__(self, device_index: int) -> None:
        import cupy

        self._device = cupy.cuda.Device(device_index)
        self._lock = threading.Lock()
        with self._device:
            self._max_blocks = self._device.attributes["MultiProcessorCount"] * _BLOCKS_PER_MULTIPROCESSOR
            self._kernel = cupy.RawKernel(SOURCE, KERNEL)
            self._stream = cupy.cuda.Stream(non_blocking=True)
            with self._stream:
                self._total = cupy.zeros(1, dtype=np.uint64)

    def run(self, pointer: int, num_bytes: int) -> int:
        num_pairs = num_bytes // LOAD_BYTES
        num_blocks = max(1, min(-(-num_pairs // _THREADS), self._max_blocks))
        arguments = (np.uint64(pointer), np.uint64(num_pairs), self._total)
        with self._lock, self._device, self._stream:
            self._total.fill(0)
            self._kernel((num_blocks,), (_THREADS,), arguments)
            total: Any = self._total.get(stream=self._stream)
        return int(total[0])


@cache
def _hasher(device_index: int) -> _Hasher:
    return _Hasher(device_index)
