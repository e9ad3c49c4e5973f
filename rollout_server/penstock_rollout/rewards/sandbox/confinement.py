"""Confines a process for the rest of its life, with namespaces, Landlock, seccomp and resource limits.

| layer      | prevents or limits                                                     | needs                    |
|------------|------------------------------------------------------------------------|--------------------------|
| Landlock   | files outside its folder and the interpreter's, /proc, other processes | Linux 5.13, enabled      |
| seccomp    | sockets, signals to others, leaving its process group, mounts, ptrace  | x86-64 or ARM64          |
| namespaces | the network, a second time; processes are counted per program          | root, or user namespaces |
| user       | root rights: the program runs as another user                          | starting as root         |
| rlimits    | CPU, address space, file size, number of processes and descriptors     | any Unix                 |

Landlock and seccomp are required, because they provide the isolation. The other layers are added where the machine
allows them. The sandbox does not protect against kernel bugs and side channels, and does not limit the total memory of
all processes or the total disk use in the private folder. If a machine holds secrets that matter, run these tests in a
separate virtual machine.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from penstock_rollout.rewards.sandbox import landlock, seccomp
from penstock_rollout.rewards.sandbox.system_calls import check, load_libc

FIRST_USER, NUM_USERS = 60000, 5000
"""Range of user ids without an account. A reward process that runs as root picks one of them for its programs, so that
the process limit counts only these programs."""
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 8, 38, 47
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, _CAPABILITY_VERSION = 2, 2, 0x20080522
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000


@dataclass(frozen=True)
class Limits:
    cpu_s: int
    memory_bytes: int
    file_bytes: int
    max_processes: int


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

    @classmethod
    def wanted(cls) -> Layers:
        """All layers that this kernel supports. `usable_layers` tries whether this process may use them."""
        if sys.platform != "linux":
            return cls(0, has_seccomp=False, has_namespaces=False, drops_user=False)
        return cls(
            landlock_abi=landlock.supported_abi(),
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


class Confinement:
    """The confinement of one program. The parent calls `prepare`; the child calls `apply` between fork and exec, where
    it only makes system calls."""

    def __init__(self, layers: Layers, limits: Limits, folder: Path) -> None:
        self.layers = layers
        self.limits = limits
        self.folder = folder
        self._libc = load_libc() if sys.platform == "linux" else None
        self._ruleset = -1
        self._max_processes = limits.max_processes
        self._user = FIRST_USER + os.getpid() % NUM_USERS

    def prepare(self) -> None:
        if self.layers.landlock_abi:
            self._ruleset = landlock.make_ruleset(self.layers.landlock_abi, self.folder)
        if self.layers.drops_user:
            os.chown(self.folder, self._user, self._user)
        elif not self.layers.has_namespaces:
            # Without namespaces or a separate user, the kernel counts all processes of this user.
            self._max_processes += _num_threads_of(os.getuid())

    def close(self) -> None:
        if self._ruleset >= 0:
            os.close(self._ruleset)
            self._ruleset = -1

    def apply(self) -> None:
        if self._libc is not None:
            self._drop_rights(self._libc)
        if self.layers.has_seccomp:
            assert self._libc is not None
            seccomp.restrict(self._libc)
        limits = self.limits
        for name, soft, hard in (
            (resource.RLIMIT_CPU, limits.cpu_s, limits.cpu_s + 1),
            (resource.RLIMIT_FSIZE, limits.file_bytes, limits.file_bytes),
            (resource.RLIMIT_NPROC, self._max_processes, self._max_processes),
            (resource.RLIMIT_NOFILE, 256, 256),
            (resource.RLIMIT_CORE, 0, 0),
            # This limit comes last: the fork of a large process already exceeds it and cannot allocate any more.
            (resource.RLIMIT_AS, limits.memory_bytes, limits.memory_bytes),
        ):
            resource.setrlimit(name, (soft, hard))

    def _drop_rights(self, libc: ctypes.CDLL) -> None:
        if self.layers.has_namespaces:
            # Root needs no user namespace, and could not switch to another user inside one.
            user = 0 if self.layers.drops_user else _CLONE_NEWUSER
            check(libc.unshare(user | _CLONE_NEWNET | _CLONE_NEWIPC), "unshare")
        if self.layers.drops_user:
            _become(libc, self._user)
        check(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
        if self._ruleset >= 0:
            landlock.restrict(libc, self._ruleset)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent dies."""
    if sys.platform == "linux":
        check(load_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def _become(libc: ctypes.CDLL, user: int) -> None:
    """Switch to another user, but keep the right to read files of root, such as an interpreter under /root.

    Landlock still limits which files can be read.
    """
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
