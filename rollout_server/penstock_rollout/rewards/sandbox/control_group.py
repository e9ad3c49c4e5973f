"""A control group limits the memory and the number of all processes of a program together. Temporary file systems and
buffers of the kernel count as memory.

A reward process makes one group for its programs, where the machine lets it: as root on a host, or in a subtree that
systemd has delegated. Containers usually do not allow it. Version 2 and version 1 of the kernel's interface work.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids")
_EMPTY_S = 5.0
"""How long the kernel may take to remove a killed process from its group."""


def _prefix() -> str:
    """Start of the names of groups whose process ids mean the same as ours: other containers may share the folder."""
    return f"penstock-code-{Path('/proc/self/ns/pid').stat().st_ino}-"


class ControlGroup:
    """The group of one reward process: one folder in version 2, one folder for each controller in version 1."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    @classmethod
    def create(cls, root: Path = _ROOT, memberships: str | None = None) -> ControlGroup | None:
        """Make a group, or return None where that is not possible. Removes the groups of processes that have died."""
        try:
            text = Path("/proc/self/cgroup").read_text() if memberships is None else memberships
        except OSError:
            return None
        parents = _parents(root, text)
        if not parents:
            return None
        group = cls([])
        try:
            for choices in parents:
                group.folders.append(_make_folder(choices))
            group.limit(2**40, 2**15)
        except OSError:
            group.close()
            return None
        return group

    def limit(self, memory_bytes: int, max_processes: int) -> None:
        """Set the limits. Raises OSError if the group does not have both controllers."""
        self._write(("memory.max", "memory.limit_in_bytes"), memory_bytes)
        self._write(("pids.max",), max_processes)
        with contextlib.suppress(OSError):
            self._write(("memory.swap.max",), 0)

    def open_entrances(self) -> list[int]:
        """Descriptors to which a process writes 0 to enter the group. The caller closes them."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC) for folder in self.folders]

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
        """Kill every process of the group."""
        for folder in self.folders:
            _kill(folder)

    def close(self) -> None:
        for folder in self.folders:
            _remove(folder)

    def _write(self, names: tuple[str, ...], value: int) -> None:
        for folder in self.folders:
            for name in names:
                if (folder / name).exists():
                    (folder / name).write_text(str(value))
                    return
        raise FileNotFoundError(f"no {' or '.join(names)} in {self.folders}")


def _parents(root: Path, memberships: str) -> list[list[Path]]:
    """For each folder to make, the folders in which it may be made, the nearest first."""
    mounted = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            mounted[controller] = path
    if set(_CONTROLLERS) <= mounted.keys():
        return [_with_ancestors(root / controller, mounted[controller]) for controller in _CONTROLLERS]
    if "" in mounted and (root / "cgroup.controllers").exists():
        return [_with_ancestors(root, mounted[""])]
    return []


def _with_ancestors(mount: Path, path: str) -> list[Path]:
    """The group of this process and the groups above it, as far as this process can see them."""
    own = mount / path.strip("/")
    found = [own, *own.parents]
    return [folder for folder in found[: found.index(mount) + 1] if folder.is_dir()] if ".." not in path else []


def _make_folder(choices: list[Path]) -> Path:
    """Make a folder in the first parent that provides the controllers and accepts it.

    A group of version 2 that has processes cannot give controllers to its children, so the group above is tried."""
    error: OSError = FileNotFoundError("this process is in no control group")
    for parent in choices:
        try:
            _remove_leftovers(parent)
            folder = parent / f"{_prefix()}{os.getpid()}"
            if (parent / "cgroup.subtree_control").exists():
                (parent / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
            folder.mkdir()
        except OSError as caught:
            error = caught
            continue
        return folder
    raise error


def _remove_leftovers(parent: Path) -> None:
    """Remove the groups of reward processes that were killed, with the programs that still run in them."""
    for folder in parent.glob(f"{_prefix()}*"):
        pid = folder.name.removeprefix(_prefix())
        if pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    """Kill the processes of a group and remove it."""
    deadline = time.monotonic() + _EMPTY_S
    while folder.exists() and time.monotonic() < deadline:
        _kill(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.01)


def _kill(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / "cgroup.kill").write_text("1")
        return
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
