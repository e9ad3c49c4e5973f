"""Private folders of programs, and removing them whatever a program left in them.

A reward process has one base folder, which it locks for as long as it lives. The folders of its programs are inside. A
base folder without a lock was left by a process that was killed; the next reward process removes it, with the programs
that still run in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)
PREFIX = "penstock-code-"
_MAX_ATTEMPTS = 5
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class BaseFolder:
    """The folder of one reward process."""

    path: Path
    _lock: int
    """A descriptor that holds the lock."""
    _num_folders: int = 0

    @classmethod
    def create(cls) -> BaseFolder:
        """Make a locked folder that everyone can enter and no one else can list."""
        while True:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            lock = os.open(path, _OPEN_FOLDER)
            # Between the two calls another process may have taken the folder for a leftover.
            if _lock(lock) and path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
                path.chmod(0o711)
                return cls(path, lock)
            os.close(lock)

    @contextlib.contextmanager
    def private_folder(self) -> Iterator[Path]:
        """A new folder that only its owner can enter. It is removed at the end of the block."""
        self._num_folders += 1
        folder = self.path / str(self._num_folders)
        folder.mkdir(0o700)
        try:
            yield folder
        finally:
            remove_tree(folder)

    def close(self) -> None:
        remove_tree(self.path)
        os.close(self._lock)


def remove_leftovers() -> None:
    """Remove the base folders of processes that were killed, and end the programs that still run in them."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(path, _OPEN_FOLDER)
        except OSError:
            continue  # removed meanwhile, or another user's
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _lock(lock):
                _end_programs(path)
                remove_tree(path)
        finally:
            os.close(lock)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _end_programs(base: Path) -> None:
    """Kill the process groups of programs whose home was below `base`."""
    home = f"HOME={base}/".encode()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if any(variable.startswith(home) for variable in environment.read_bytes().split(b"\0")):
                os.killpg(os.getpgid(int(environment.parent.name)), signal.SIGKILL)


def remove_tree(path: Path) -> bool:
    """Remove a folder with everything in it. Never raises; logs and returns False if something could not be removed.

    Links are removed and never followed. Closed folders, and those nested deeper than Python removes, are left to `rm`,
    which opens one folder at a time."""
    failure: Exception | None = None
    for _ in range(_MAX_ATTEMPTS):
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass  # removed, or changed by a program that still ends
        except (OSError, RecursionError) as error:
            failure = error
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run([*command, "--", str(path)], stderr=subprocess.DEVNULL, check=False)
        if not path.exists():
            return True
    logger.error("cannot remove %s: %s; remove it by hand", path, failure)
    return False
