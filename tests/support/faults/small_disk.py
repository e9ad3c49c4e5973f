"""A disk that is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A tmpfs of this size, which only root can mount. Without root the test is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True, timeout=100).returncode != 0:
        pytest.skip("cannot mount a tmpfs here; run as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=100)


def fill(folder: Path) -> Path:
    """Use up the disk, and return the file that did."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 65536)
    return filler
