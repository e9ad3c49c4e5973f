"""A program that runs under a confinement: its limits, how much of them its processes and files use, its input, output
and end.

The kernel holds the limits of each process. The memory of all processes together, with temporary file systems and
buffers of the kernel, is held by a control group where there is one; otherwise the sandbox measures it while the
program runs, and so it does with files.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

MAX_FILES = 10_000
"""Maximum number of files in a program's folder."""
MAX_DEPTH = 100
"""How deep folders may be nested in a program's folder."""
_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids")
_EMPTY_S = 5.0
"""How long the kernel may take to remove a killed process from its group."""


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

    def of_a_process(self, num_others: int = 0) -> list[tuple[str, int, int]]:
        """Resource limits as (name, soft, hard). Up to `num_others` processes of the same user do not belong to the
        program. RLIMIT_AS comes last: the fork of a large process already exceeds it and cannot allocate any more."""
        max_processes = self.max_processes + num_others
        return [
            ("CPU", self.cpu_s, self.cpu_s + 1),
            ("FSIZE", self.file_bytes, self.file_bytes),
            ("NPROC", max_processes, max_processes),
            ("NOFILE", 256, 256),
            ("CORE", 0, 0),
            ("MEMLOCK", 0, 0),
            ("AS", self.memory_bytes, self.memory_bytes),
        ]


@dataclass(frozen=True)
class ProcessEntry:
    """One line of /proc."""

    parent: int
    session: int
    num_threads: int
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
        found[int(name)] = ProcessEntry(int(fields[1]), int(fields[3]), int(fields[17]), int(fields[21]) * page_bytes)
    return found


def descendants(ancestor: int, processes: Mapping[int, ProcessEntry]) -> list[int]:
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
    """Whether the files below a folder, and removed files that processes still use, are too many, too large
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


def _prefix() -> str:
    """Start of the names of groups whose process ids mean the same as ours: other containers may share the folder."""
    return f"penstock-code-{Path('/proc/self/ns/pid').stat().st_ino}-"


class ControlGroup:
    """Limits the memory and the number of all processes of a program together.

    A reward process makes one group for its programs, where the machine lets it: as root on a host, or in a subtree
    that systemd has delegated. Containers usually do not allow it. Version 2 of the kernel's interface has one folder,
    version 1 a folder for each controller."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    @classmethod
    def create(cls, root: Path = _ROOT, memberships: str | None = None) -> ControlGroup | None:
        """Make a group, or return None where that is not possible. Removes the groups of processes that have died."""
        group = cls([])
        try:
            text = Path("/proc/self/cgroup").read_text() if memberships is None else memberships
            for choices in _parents(root, text):
                group.folders.append(_make_folder(choices))
            group.limit(2**40, 2**15)
        except OSError:
            group.close()
            return None
        return group

    def limit(self, memory_bytes: int, max_processes: int) -> None:
        self._write(("memory.max", "memory.limit_in_bytes"), memory_bytes)
        self._write(("pids.max",), max_processes)
        with contextlib.suppress(OSError):
            self._write(("memory.swap.max",), 0)

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def kill(self) -> None:
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
    """Make a folder in the first parent that provides the controllers and accepts it. A group of version 2 that has
    processes cannot give controllers to its children, so the group above is tried."""
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


FIRST_USER, NUM_USERS = 60000, 5000
"""Range of user ids without an account."""
READABLE = (
    sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent), "/usr", "/lib", "/lib64", "/bin",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random",
)  # fmt: skip
"""Paths that an interpreter needs to start and import. /proc, /home, /tmp and the rest of /etc stay closed."""
POLL_S = 0.05
ERROR_TAIL_BYTES = 4096
READ_BYTES = 65536
MEASURE_S = 0.2
"""How often the memory and the files of a running program are measured."""

Ending = Literal["itself", "deadline", "output", "memory", "files", "processes"]


def start_process(command: Sequence[str], cwd: Path, home: Path, **settings: Any) -> subprocess.Popen[bytes]:
    """Start a command with pipes, as the leader of a session. It sees no environment variables of this process."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env=environment, start_new_session=True, **settings
    )


def own_user() -> int:
    """The user of the programs of a reward process that runs as root. It has no others, so that the process limit
    counts only these programs."""
    return FIRST_USER + os.getpid() % NUM_USERS


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    exit_code: int
    """Negative, or 128 and more under bubblewrap, if a signal ended the program."""
    stdout: bytes
    error_tail: bytes
    """The last ERROR_TAIL_BYTES of standard error."""
    ended: Ending
    """Why the program ended: it exited by itself, its time was up, it printed too much, or it exceeded its memory, the
    size of its files or the number of its processes."""

    @property
    def succeeded(self) -> bool:
        return self.ended == "itself" and self.exit_code == 0


class RunningProgram:
    """A program that has been started. What its processes and files use together is measured, unless the kernel holds
    the limit: it holds the memory if there is a control group, the files if there is no `folder`, and the number of
    processes unless `counts_processes`."""

    def __init__(
        self, process: subprocess.Popen[bytes], limits: Limits, group: ControlGroup | None, folder: Path | None = None,
        *, counts_processes: bool = False,
    ) -> None:  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self.process = process
        """The process to wait for. Its standard streams are the program's."""
        self._limits = limits
        self._holds_memory = group is not None
        self._folder = folder
        self._counts_processes = counts_processes
        self._written = bytearray()
        self._errors = b""

    def pids(self, processes: Mapping[int, ProcessEntry]) -> list[int]:
        """The ids of the program's processes."""
        raise NotImplementedError

    def kill(self) -> None:
        """Kill every process of the program and wait for their end. May be called again."""
        raise NotImplementedError

    def has_too_many_processes(self) -> bool:
        if not self._counts_processes:
            return False
        processes = read_processes()
        return sum(processes[pid].num_threads for pid in self.pids(processes)) > self._limits.max_processes

    def exceeded(self) -> Literal["memory", "files"] | None:
        """The limit that all processes or all files together exceed, if any."""
        if self._holds_memory and self._folder is None:
            return None
        processes = read_processes() if sys.platform == "linux" else {}
        pids = self.pids(processes)
        if not self._holds_memory and memory_is_exceeded(pids, processes, self._limits.memory_bytes):
            return "memory"
        if self._folder is not None and files_are_exceeded(self._folder, self._limits.folder_bytes, pids):
            return "files"
        return None

    def run(self, stdin: bytes, output_bytes: int, deadline: float) -> Outcome:
        """Feed and read the program until it ends or exceeds a limit, then kill all of it. Descendants of the program
        that keep a pipe open are not waited for."""
        self._to_write, self._output_bytes = memoryview(stdin), output_bytes
        with selectors.DefaultSelector() as selector:
            for stream in (self._stdin, self._stdout, self._stderr):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_WRITE if stream is self._stdin else selectors.EVENT_READ)
            ended = self._follow(selector, deadline)
        self.kill()
        return Outcome(self.process.returncode, bytes(self._written), self._errors, ended)

    def _follow(self, selector: selectors.BaseSelector, deadline: float) -> Ending:
        counts_at = time.monotonic()
        measures_at = counts_at + MEASURE_S
        while True:
            has_ended = _has_ended(self.process)
            self._transfer(selector, 0 if has_ended else min(POLL_S, max(0.0, deadline - time.monotonic())))
            if len(self._written) > self._output_bytes:
                return "output"
            now = time.monotonic()
            if has_ended or now >= counts_at:
                counts_at = now + POLL_S
                if self.has_too_many_processes():
                    return "processes"
            if has_ended:
                return "itself"
            if now >= deadline:
                return "deadline"
            if now >= measures_at:
                measures_at = now + MEASURE_S
                if (limit := self.exceeded()) is not None:
                    return limit

    def _transfer(self, selector: selectors.BaseSelector, wait_s: float) -> None:
        """Read and write the bytes that are ready. Waits for some, up to `wait_s`."""
        if not selector.get_map():
            time.sleep(min(wait_s, 0.002))
            return
        for key, _ in selector.select(wait_s):
            if key.fileobj is self._stdin:
                self._feed(selector)
            else:
                self._read(selector, key.fd, is_output=key.fileobj is self._stdout)

    def _feed(self, selector: selectors.BaseSelector) -> None:
        try:
            self._to_write = self._to_write[os.write(self._stdin.fileno(), self._to_write[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._to_write = memoryview(b"")
        if not self._to_write:
            selector.unregister(self._stdin)
            self._stdin.close()

    def _read(self, selector: selectors.BaseSelector, descriptor: int, *, is_output: bool) -> None:
        """Read the bytes that are available, up to one chunk past the output limit."""
        while True:
            try:
                chunk = os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                selector.unregister(descriptor)
                return
            if is_output:
                self._written += chunk
                if len(self._written) > self._output_bytes:
                    return
            else:
                self._errors = (self._errors + chunk)[-ERROR_TAIL_BYTES:]
                return


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Check without reaping, so that the process id, which is also the group id, stays reserved until the kill."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
