"""The limits of a program, and how much of them its processes and files use.

The kernel holds the limits of each process. The memory of all processes together is held by a
control group where there is one; otherwise the sandbox measures it while the program runs, and so it does with files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_FILES = 10_000
"""Maximum number of files in a program's folder."""
MAX_DEPTH = 100
"""How deep folders may be nested in a program's folder."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program."""

    cpu_s: int
    """CPU time that each process may use."""
    memory_bytes: int
    """Size of each process's address space, and memory that all processes may hold together."""
    file_bytes: int
    """Size that each file may have."""
    folder_bytes: int
    """Size that all files of the folder may have together."""
    max_processes: int

    def of_a_process(self, num_others: int = 0) -> list[tuple[int, int, int]]:
        """Resource limits as (name, soft, hard). `num_others` processes of the same user do not belong to the program.

        RLIMIT_AS comes last: the fork of a large process already exceeds it and cannot allocate any more."""
        max_processes = self.max_processes + num_others
        return [
            (resource.RLIMIT_CPU, self.cpu_s, self.cpu_s + 1),
            (resource.RLIMIT_FSIZE, self.file_bytes, self.file_bytes),
            (resource.RLIMIT_NPROC, max_processes, max_processes),
            (resource.RLIMIT_NOFILE, 256, 256),
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_MEMLOCK, 0, 0),
            (resource.RLIMIT_AS, self.memory_bytes, self.memory_bytes),
        ]


@dataclass(frozen=True)
class ProcessEntry:
    """One line of /proc."""

    parent: int
    session: int
    resident_bytes: int


def read_processes() -> dict[int, ProcessEntry]:
    """All processes that this process can see, by id."""
    found = {}
    page_bytes = resource.getpagesize()
    for name in os.listdir("/proc"):  # noqa: PTH208  (a Path for each process would double the cost)
        if not name.isdecimal():
            continue
        try:
            # The command's name is in brackets, and may itself hold brackets and spaces.
            fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it has ended
        found[int(name)] = ProcessEntry(int(fields[1]), int(fields[3]), int(fields[21]) * page_bytes)
    return found


def in_session(session: int, processes: Mapping[int, ProcessEntry]) -> list[int]:
    """The processes of a session."""
    return [pid for pid, entry in processes.items() if entry.session == session]


def descendants(ancestor: int, processes: Mapping[int, ProcessEntry]) -> list[int]:
    """A process and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid, entry in processes.items():
        children.setdefault(entry.parent, []).append(pid)
    found = [ancestor] if ancestor in processes else []
    for pid in found:
        found += children.get(pid, [])
    return found


def memory_is_exceeded(pids: Iterable[int], processes: Mapping[int, ProcessEntry], limit_bytes: int) -> bool:
    """Whether processes together use more memory than the limit. Shared pages count once."""
    resident = {pid: processes[pid].resident_bytes for pid in pids}
    if sum(resident.values()) <= limit_bytes:
        return False
    return sum(_proportional_bytes(pid, num_bytes) for pid, num_bytes in resident.items()) > limit_bytes


def _proportional_bytes(pid: int, resident_bytes: int) -> int:
    """Memory of a process in which each page is divided by the number of processes that share it."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resident_bytes


def files_are_exceeded(folder: Path, limit_bytes: int, pids: Iterable[int] = ()) -> bool:
    """Whether the files below a folder, and those that processes have removed but still use, are too many, too large
    together or too deep, or cannot be counted."""
    removed = _removed_files(folder, pids)
    if removed is None:
        return True
    num_bytes, num_files = sum(removed.values()), len(removed)
    folders = [(str(folder), 0)]
    while folders:
        path, depth = folders.pop()
        if depth > MAX_DEPTH:
            return True
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    num_bytes += status.st_blocks * 512
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, depth + 1))
                    if num_bytes > limit_bytes or num_files > MAX_FILES:
                        return True
        except FileNotFoundError:
            continue  # the program removed it
        except OSError:
            return True  # closed, which would hide what is in it
    return num_bytes > limit_bytes


def _removed_files(folder: Path, pids: Iterable[int]) -> dict[int, int] | None:
    """Sizes of the files without a name that processes have open, by inode. None if a process maps one that it has
    closed, because its size is unknown then."""
    device = folder.stat().st_dev
    sizes: dict[int, int] = {}
    mapped: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or this process may not look into it
            for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208  (a Path for each would double the cost)
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode) and status.st_dev == device:
                        sizes[status.st_ino] = status.st_blocks * 512
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            start = f"{folder}/"
            mapped.update(int(line.split()[4]) for line in lines if start in line and line.endswith(" (deleted)"))
    return sizes if mapped <= sizes.keys() else None
