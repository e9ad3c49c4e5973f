"""Landlock lets a process restrict, for itself and its descendants, which files it can access."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path

from penstock_rollout.rewards.sandbox.system_calls import check, load_libc

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
READABLE = (
    sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(os.__file__).parent), "/usr", "/lib", "/lib64", "/bin",
    "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random",
)  # fmt: skip
"""Paths that an interpreter needs to start and import. /proc, /home, /tmp and the rest of /etc stay closed."""


def supported_abi() -> int:
    """Version of Landlock's interface, or 0 if the kernel lacks Landlock or has it disabled."""
    if sys.platform != "linux":
        return 0
    return max(0, int(load_libc().syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def make_ruleset(abi: int, folder: Path) -> int:
    """Create a ruleset that allows reading `READABLE` and using `folder`, except for devices and sockets in it.

    Every other kind of access that the kernel can restrict is denied."""
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


def restrict(libc: ctypes.CDLL, ruleset: int) -> None:
    """Apply the rules to the calling process, which must have set PR_SET_NO_NEW_PRIVS."""
    check(libc.syscall(_LANDLOCK_RESTRICT, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
