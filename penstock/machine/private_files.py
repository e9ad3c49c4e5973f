"""Keeps the files of a run to the user who runs it: prompts, weights, logs and keys are nobody else's business."""

from __future__ import annotations

import os
from pathlib import Path


def keep_files_private() -> None:
    """Create every file of this process and its children as 0600, and every folder as 0700."""
    os.umask(0o077)


def close_to_others(folder: Path) -> None:
    """Take a folder that exists from other users. A folder of another user stays as it is."""
    if folder.stat().st_uid == os.getuid():
        folder.chmod(0o700)
