"""Free space on the disks of a run: it is measured before a disk is full, and errors of a full disk are recognized."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
LOW_BYTES, LOW_SHARE = 5 * 2**30, 0.05
"""Free space is low below this many bytes and below this share of the disk."""
FULL_BYTES = 2**20
"""A failed write to a disk with less free space than this has failed because the disk is full."""
_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class DiskSpace:
    """Space on the disk that holds `folder`."""

    folder: Path
    free_bytes: int
    size_bytes: int
    needed_bytes: int = 0
    """Space that the next files need."""

    @property
    def is_low(self) -> bool:
        return self.free_bytes < max(self.needed_bytes, min(LOW_BYTES, LOW_SHARE * self.size_bytes))

    def __str__(self) -> str:
        return f"{_gib(self.free_bytes)} of {_gib(self.size_bytes)} GiB are free under {self.folder}"


def measure_disk(folder: Path, needed_bytes: int = 0) -> DiskSpace:
    """Measure the disk of a folder, or of its nearest parent that exists."""
    found = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(found)
    return DiskSpace(found, usage.free, usage.total, needed_bytes)


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Whether a write to the folder failed because its disk, or the user's quota, is full.

    Errors that crossed a process have only their text, and torch reports a short write as an error of its own."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if any(isinstance(each, OSError) and each.errno in _FULL_ERRORS for each in causes):
        return True
    if any(os.strerror(number) in str(error) for number in _FULL_ERRORS):
        return True
    return measure_disk(folder).free_bytes < FULL_BYTES


class DiskWatch:
    """Measures a folder's disk, and logs a warning each time when space becomes low."""

    def __init__(self, folder: Path, holds: str) -> None:
        self.folder = folder
        self.holds = holds
        """What the folder holds, for the warning."""
        self.needed_bytes = 0
        self._was_low = False

    def measure(self) -> DiskSpace:
        space = measure_disk(self.folder, self.needed_bytes)
        if space.is_low and not self._was_low:
            needed = f"; the next checkpoint needs {_gib(self.needed_bytes)} GiB" if self.needed_bytes else ""
            logger.warning("%s, which holds %s%s; free space before it is full", space, self.holds, needed)
        self._was_low = space.is_low
        return space


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g}"
