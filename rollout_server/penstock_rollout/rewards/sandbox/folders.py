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
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)
PREFIX = "penstock-code-"
_MAX_ATTEMPTS = 5
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class BaseFolder:
    """The folder of one reward process. `lock` is a descriptor that holds the lock."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._num_folders = 0

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

    It opens one folder at a time, from its parent or its child, so no depth exceeds the length of a path or the number
    of descriptors. Links are removed and never followed."""
    if sys.platform != "linux":
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    failure: OSError | None = None
    for _ in range(_MAX_ATTEMPTS):
        try:
            _empty(path)
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:  # a program that still ends may have changed the tree meanwhile
            failure = error
        else:
            return True
    logger.error("cannot remove %s: %s; remove it by hand", path, failure)
    return False


def _empty(path: Path) -> None:
    """Remove everything in a folder, the deepest folders first. `entered` is the way from the top to the open folder:
    for each folder on it the device and inode of its parent, its name, and the sibling folders that remain."""
    parent = os.open(path.parent, _OPEN_FOLDER)
    try:
        folder = _open_folder(path.name, parent)
    finally:
        os.close(parent)
    entered: list[tuple[tuple[int, int], str, list[str]]] = []
    try:
        names = _remove_files(folder)
        while names or entered:
            if names:
                name = names.pop()
                inner = _open_folder(name, folder)
                entered.append((_identity(folder), name, names))
                folder, outer = inner, folder
                os.close(outer)
                names = _remove_files(folder)
            else:
                identity, name, names = entered.pop()
                outer = os.open("..", _OPEN_FOLDER, dir_fd=folder)
                folder, inner = outer, folder
                os.close(inner)
                if _identity(folder) != identity:
                    raise OSError("a folder was moved while it was removed")
                os.rmdir(name, dir_fd=folder)
    finally:
        os.close(folder)


def _remove_files(folder: int) -> list[str]:
    """Remove everything in a folder but folders, whose names are returned."""
    names = os.listdir(folder)
    folders = [name for name in names if _is_folder(name, folder)]
    for name in set(names).difference(folders):
        os.unlink(name, dir_fd=folder)
    return folders


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)


def _open_folder(name: str, parent: int) -> int:
    """Open a folder after giving its owner all rights."""
    path = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        if os.fstat(path).st_mode & 0o700 != 0o700:
            Path(f"/proc/self/fd/{path}").chmod(0o700)
        return os.open(".", _OPEN_FOLDER, dir_fd=path)
    finally:
        os.close(path)
