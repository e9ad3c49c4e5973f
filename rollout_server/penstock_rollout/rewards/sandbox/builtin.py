"""Confines a process for the rest of its life, with namespaces, Landlock, seccomp and resource limits. It is for
machines where bubblewrap cannot start, such as pods without user namespaces: it needs no other program and few rights.

| layer      | prevents or limits                                                      | needs                    |
|------------|-------------------------------------------------------------------------|--------------------------|
| Landlock   | files outside its folder and the interpreter's, /proc, other processes  | Linux 5.13, enabled      |
| seccomp    | sockets, signals to others, leaving its process group, mounts, ptrace,  | x86-64 or ARM64          |
|            | changes of modes and times of the server's files                        |                          |
| namespaces | the network, a second time; processes are counted per program           | root, or user namespaces |
| user       | root rights: the program runs as another user                           | starting as root         |
| rlimits    | CPU, address space, file size, number of processes and descriptors      | any Unix                 |

Landlock and seccomp are required; the other layers are added where the machine allows them. A program still sees that
files outside exist, with sizes and times: Landlock does not restrict `stat`. It does not protect against kernel bugs
and side channels: if a machine holds secrets that matter, run these tests in a separate virtual machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock_rollout.rewards.sandbox import seccomp
from penstock_rollout.rewards.sandbox.program import (
    READABLE,
    ControlGroup,
    Limits,
    ProcessEntry,
    RunningProgram,
    own_user,
    start_process,
)
from penstock_rollout.rewards.sandbox.seccomp import check, load_libc

logger = logging.getLogger(__name__)
PREFIX = "penstock-code-"
_MAX_ATTEMPTS = 5
_MAX_LATER_OTHERS = 128
"""How many threads other programs of the server's user may start while a program runs. A program can use up as many
until it is ended, and a pod may have few."""
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class BaseFolder:
    """The folder of one reward process, which it locks for as long as it lives. The folders of its programs are inside.
    A folder without a lock was left by a process that was killed: the next reward process removes it, with the programs
    that still run in it."""

    path: Path
    _lock: int
    """A descriptor that holds the lock."""

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
        folder = Path(tempfile.mkdtemp(dir=self.path))
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


_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 8, 38, 47
_PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION = 2, 2, 0x20080522
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15


@dataclass(frozen=True)
class Layers:
    """A choice of layers of confinement."""

    landlock_abi: int
    has_seccomp: bool
    has_namespaces: bool
    drops_user: bool

    @property
    def isolates(self) -> bool:
        return self.landlock_abi > 0 and self.has_seccomp

    @property
    def counts_processes(self) -> bool:
        """Whether the sandbox counts the processes of a program: without namespaces or a separate user, the kernel
        counts all processes of the server's user. Without seccomp they can leave the session, so the kernel's count
        has to do."""
        return self.has_seccomp and not self.drops_user and not self.has_namespaces

    @classmethod
    def wanted(cls) -> Layers:
        """All layers that this kernel supports. `usable_layers` tries whether this process may use them."""
        if sys.platform != "linux":
            return cls(0, has_seccomp=False, has_namespaces=False, drops_user=False)
        abi = int(load_libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))
        return cls(
            landlock_abi=max(0, abi),  # negative if the kernel lacks Landlock or has it disabled
            has_seccomp=seccomp.is_supported(),
            has_namespaces=True,
            drops_user=os.geteuid() == 0,
        )

    def weaker(self) -> list[Layers]:
        """Choices to try in this order, from these layers down to none."""
        no_namespaces = replace(self, has_namespaces=False)
        choices = [self, no_namespaces, replace(self, drops_user=False), replace(no_namespaces, drops_user=False)]
        bare = Layers(0, has_seccomp=False, has_namespaces=False, drops_user=False)
        return list(dict.fromkeys([*choices, bare]))


class Builtin:
    """Runs programs under layers of confinement, each in a private folder."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.name = "builtin" if layers.isolates else "none"

    @classmethod
    def choices(cls) -> list[Builtin]:
        """Ways to try in this order. The last one does not isolate."""
        return [cls(layers) for layers in Layers.wanted().weaker()]

    @functools.cached_property
    def _base(self) -> BaseFolder:
        return BaseFolder.create()

    @contextlib.contextmanager
    def start(
        self, command: Sequence[str], files: Mapping[str, str], limits: Limits, group: ControlGroup | None
    ) -> Iterator[ConfinedProgram]:
        """Start a command with `files` in its folder. At the end of the block its processes and files are gone. Raises
        OSError or subprocess.SubprocessError if it cannot be started."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._base.private_folder())
            for name, text in files.items():
                (folder / name).write_text(text, encoding="utf-8", errors="replace")
                (folder / name).chmod(0o644)
            entrances: list[int] = []
            if group is not None:
                group.limit(limits.memory_bytes, limits.max_processes)
                stack.callback(group.kill)
                for entrance in group.folders:
                    entrances.append(os.open(entrance / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                    stack.callback(os.close, entrances[-1])
            with Restrictions(self.layers, limits, folder, entrances) as restrictions:
                process = start_process(command, folder, folder, preexec_fn=restrictions.apply)
            stack.enter_context(process)
            counts = group is None and self.layers.counts_processes
            running = ConfinedProgram(process, limits, group, folder, counts_processes=counts)
            stack.callback(running.kill)
            yield running

    def close(self) -> None:
        if "_base" in self.__dict__:
            self._base.close()


class ConfinedProgram(RunningProgram):
    """A program that leads a process group and a session that it cannot leave."""

    def pids(self, processes: Mapping[int, ProcessEntry]) -> list[int]:
        return [pid for pid, entry in processes.items() if entry.session == self.process.pid]

    def kill(self) -> None:
        """Kill the program's process group and reap all of it."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(ChildProcessError):
            while True:  # orphans of the program became our children, and count against the process limit until reaped
                os.waitpid(-self.process.pid, 0)


class Restrictions:
    """Restricts one process. The child calls `apply` between fork and exec, where it only makes system calls; the
    calling process has one thread."""

    def __init__(self, layers: Layers, limits: Limits, folder: Path, entrances: Sequence[int]) -> None:
        self._layers = layers
        self._entrances = entrances
        self._folder = folder
        self._libc = load_libc() if sys.platform == "linux" else None
        self._ruleset = -1
        self._user = own_user()
        # Without namespaces or a separate user, the kernel counts all processes of this user, also those that start
        # later. Its limit then only bounds a burst.
        num_others = 0 if layers.drops_user or layers.has_namespaces else _num_threads_of(os.getuid())
        process_limits = limits.of_a_process(num_others + _MAX_LATER_OTHERS * layers.counts_processes)
        self._limits = [(getattr(resource, f"RLIMIT_{name}"), (soft, hard)) for name, soft, hard in process_limits]

    def __enter__(self) -> Restrictions:
        if self._layers.landlock_abi:
            self._ruleset = make_ruleset(self._layers.landlock_abi, self._folder)
        if self._layers.has_seccomp:
            seccomp.prepare(shares_files=not self._layers.drops_user)
        if self._layers.drops_user:
            os.chown(self._folder, self._user, self._user)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ruleset >= 0:
            os.close(self._ruleset)

    def apply(self) -> None:
        for entrance in self._entrances:
            os.write(entrance, b"0")
        if self._libc is not None:
            self._drop_rights(self._libc)
        if self._layers.has_seccomp:
            assert self._libc is not None
            seccomp.restrict(self._libc, shares_files=not self._layers.drops_user)
        for limit, values in self._limits:
            resource.setrlimit(limit, values)

    def _drop_rights(self, libc: ctypes.CDLL) -> None:
        if self._layers.has_namespaces:
            # Root needs no user namespace, and could not switch to another user inside one.
            user = 0 if self._layers.drops_user else _CLONE_NEWUSER
            check(libc.unshare(user | _CLONE_NEWNET | _CLONE_NEWIPC), "unshare")
        if self._layers.drops_user:
            _become(libc, self._user)
        check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        if self._ruleset >= 0:
            restricted = libc.syscall(_LANDLOCK_RESTRICT, self._ruleset, ctypes.c_uint32(0))
            check(restricted, "landlock_restrict_self")


def _become(libc: ctypes.CDLL, user: int) -> None:
    """Switch to another user, but keep the right to read files of root, such as an interpreter under /root. Landlock
    still limits which files can be read."""
    check(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kept = 1 << _CAP_DAC_READ_SEARCH
    header, data = struct.pack("<Ii", _CAPABILITY_VERSION, 0), struct.pack("<6I", kept, kept, kept, 0, 0, 0)
    check(libc.capset(header, data), "capset")
    check(libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0), "prctl")


def _num_threads_of(uid: int) -> int:
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:
            continue
        if int(fields["Uid"].split()[0]) == uid:
            count += int(fields["Threads"])
    return count


def make_ruleset(abi: int, folder: Path) -> int:
    """Create a ruleset that allows reading `READABLE` and using `folder`, except for devices and sockets in it. Every
    other kind of access that the kernel can restrict is denied."""
    libc = load_libc()
    num_bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)
    handled = (1 << num_bits) - 1
    attributes = struct.pack("<QQQ", handled, 0b11, 0b11)  # files; TCP bind and connect; abstract sockets and signals
    num_bytes = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = int(libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(num_bytes), ctypes.c_uint32(0)))
    check(ruleset, "landlock_create_ruleset")
    try:
        for path in dict.fromkeys(READABLE):
            _allow(libc, ruleset, path, _READ_FILE | _READ_DIR | _EXECUTE)
        _allow(libc, ruleset, "/dev/null", (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
        _allow(libc, ruleset, str(folder), handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK | _IOCTL_DEV))
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def _allow(libc: ctypes.CDLL, ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not Path(path).is_dir():
            access &= _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
        rule = struct.pack("<Qi", access, descriptor)
        path_beneath = ctypes.c_uint32(1)
        check(libc.syscall(_LANDLOCK_ADD, ruleset, path_beneath, rule, ctypes.c_uint32(0)), "landlock_add_rule")
    finally:
        os.close(descriptor)
