"""shm: map the publisher's buckets. Nothing is copied."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from penstock.errors import WeightPushFailed
from penstock.weights.manifest import bucket_offsets, wire_sizes
from penstock.weights.shared_memory import SEALS, header_bytes, read_header
from penstock_rollout.weights.reception import Arrived, Reception


def receive(reception: Reception) -> Iterator[Arrived]:
    """Yield buckets in the publisher's pages, which outlive the publisher. The rendezvous is a path under /proc."""
    sizes = wire_sizes(reception.manifest)
    offsets = bucket_offsets(sizes, mmap.PAGESIZE)
    fd = _open(Path(reception.rendezvous))
    try:
        _check_sealed(fd)
        num_bytes = offsets[-1] + header_bytes(len(sizes))
        if os.fstat(fd).st_size != num_bytes:
            raise WeightPushFailed(f"{reception.rendezvous} is not {num_bytes} bytes long, as the manifest requires")
        checksums = _wait_for_header(fd, offsets[-1], reception)
        # The mapping is private: if this process wrote to it by mistake, only its own copy would change.
        mapping = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
    for offset, size, checksum in zip(offsets, sizes, checksums, strict=False):
        yield Arrived(torch.frombuffer(mapping, dtype=torch.uint8, count=size, offset=offset), checksum, True)


def _open(path: Path) -> int:
    if not str(path.absolute()).startswith("/proc/"):
        raise WeightPushFailed(f"{path} is not a path under /proc")
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightPushFailed(
            f"{path} cannot be opened ({error.strerror}); shm needs the same host, user and pid namespace; or use gloo"
        ) from error


def _check_sealed(fd: int) -> None:
    try:
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        is_sealed = False
    if not is_sealed:
        raise WeightPushFailed("the publisher's shared memory is not sealed, so other processes could change it")


def _wait_for_header(fd: int, offset: int, reception: Reception) -> list[str]:
    """Wait until the header says that the memory holds all of the announced version; return its checksums."""
    num_bytes = header_bytes(len(reception.manifest.buckets))
    while (checksums := read_header(os.pread(fd, num_bytes, offset), reception.manifest)) is None:
        reception.deadline.sleep()
    return checksums
