"""seccomp denies system calls to a process and its descendants. Which ones is in `denied_calls.py`."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import sys
from collections.abc import Iterable

from penstock_rollout.rewards.sandbox import denied_calls
from penstock_rollout.rewards.sandbox.system_calls import check

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_NEW_NAMESPACES = 0x7E020000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the index of its system call numbers, and its AUDIT_ARCH constant."""
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, (16, 24, 32, 40)
"""Offsets into what a filter sees of a call. Of each argument it loads the lower half."""
_X32 = 0x40000000
_ANY_PID = 0x7EADBEEF
"""No process has this id."""

Instruction = tuple[int, int, int, int]
_REFUSE: Instruction = (_RETURN, 0, 0, _ERRNO | _EPERM)
_PERMIT: Instruction = (_RETURN, 0, 0, _ALLOW)


def is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() in _ARCHITECTURES


def filter_program(machine: str, *, own_pid: int | None, shares_files: bool) -> list[Instruction]:
    """BPF program over the number and arguments of a call: (code, jump if true, jump if false, operand).

    `own_pid` is the only process that the program may signal. None: it has its own process ids, and may signal all.
    `shares_files` denies changes of a file's mode, times and attributes, because the program owns files of the server.
    """
    column, architecture = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER), (_JUMP_AT_LEAST, 0, 1, _X32), _REFUSE,
    ]  # fmt: skip
    tables = [(denied_calls.ALWAYS, [_REFUSE])]
    tables.append((denied_calls.ON_PID_ZERO_ONLY, _only(0, [0])))
    tables.append((denied_calls.NO_SUCH_CALL, [(_RETURN, 0, 0, _ERRNO | _ENOSYS)]))
    if shares_files:
        tables.append((denied_calls.ON_FILES_OF_THE_SERVER, [_REFUSE]))
    if own_pid is not None:
        tables.append((denied_calls.ON_PROCESSES_OF_THE_SERVER, [_REFUSE]))
        tables.append((denied_calls.ON_ITSELF_ONLY, _only(0, [own_pid])))
        tables.append(({"prctl": denied_calls.PRCTL}, _unless(0, _JUMP_EQUAL, *denied_calls.PRCTL_OPTIONS.values())))
    tables += [
        ({"clone": denied_calls.CLONE}, _unless(0, _JUMP_SET, _NEW_NAMESPACES)),
        ({"open": denied_calls.OPEN}, _open_rule(1)),
        ({"openat": denied_calls.OPENAT}, _open_rule(2)),
        ({"ioctl": denied_calls.IOCTL}, _only(1, denied_calls.IOCTL_REQUESTS.values())),
        ({"fcntl": denied_calls.FCNTL}, _fcntl_rule()),
        ({"socketpair": denied_calls.SOCKETPAIR}, _socketpair_rule()),
        ({"mmap": denied_calls.MMAP}, _mmap_rule()),
    ]
    for calls, rule in tables:
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                program += [(_JUMP_EQUAL, 0, len(rule), number), *rule]
    return [*program, _PERMIT]


def _only(argument: int, values: Iterable[int]) -> list[Instruction]:
    """Permit the call if an argument has one of the values."""
    tests = [instruction for value in values for instruction in ((_JUMP_EQUAL, 0, 1, value), _PERMIT)]
    return [(_LOAD, 0, 0, _AT_ARGUMENTS[argument]), *tests, _REFUSE]


def _unless(argument: int, test: int, *operands: int) -> list[Instruction]:
    """Refuse the call if the test of an argument holds for an operand."""
    tests = [instruction for operand in operands for instruction in ((test, 0, 1, operand), _REFUSE)]
    return [(_LOAD, 0, 0, _AT_ARGUMENTS[argument]), *tests, _PERMIT]


def _fcntl_rule() -> list[Instruction]:
    """Permit F_SETFL without O_ASYNC, and the other commands of the table."""
    set_flags = _unless(2, _JUMP_SET, denied_calls.O_ASYNC)
    return [
        (_LOAD, 0, 0, _AT_ARGUMENTS[1]), (_JUMP_EQUAL, 0, len(set_flags), denied_calls.F_SETFL), *set_flags,
        *_only(1, denied_calls.FCNTL_COMMANDS.values()),
    ]  # fmt: skip


def _open_rule(argument: int) -> list[Instruction]:
    """Refuse flags that change a file without the right to write it: truncation of a file that is opened for reading,
    which Landlock restricts only since Linux 6.2, and access mode 3, which it never restricts."""
    access, truncate = denied_calls.O_ACCMODE, denied_calls.O_TRUNC
    tests = [step for value in (access, access | truncate, truncate) for step in ((_JUMP_EQUAL, 0, 1, value), _REFUSE)]
    return [(_LOAD, 0, 0, _AT_ARGUMENTS[argument]), (_AND, 0, 0, access | truncate), *tests, _PERMIT]


def _socketpair_rule() -> list[Instruction]:
    """Permit pairs of Unix streams, which stay connected to each other. A datagram socket of a pair can send to every
    Unix socket of the machine."""
    return [
        (_LOAD, 0, 0, _AT_ARGUMENTS[0]), (_JUMP_EQUAL, 1, 0, denied_calls.AF_UNIX), _REFUSE,
        (_LOAD, 0, 0, _AT_ARGUMENTS[1]), (_AND, 0, 0, denied_calls.SOCK_TYPE_MASK),
        (_JUMP_EQUAL, 1, 0, denied_calls.SOCK_STREAM), _REFUSE, _PERMIT,
    ]  # fmt: skip


def _mmap_rule() -> list[Instruction]:
    """Refuse shared memory without a file. It stays until its last page is unmapped, and no limit of a process counts
    the pages that are unmapped before."""
    flags = denied_calls.MAP_SHARED | denied_calls.MAP_ANONYMOUS
    return [(_LOAD, 0, 0, _AT_ARGUMENTS[3]), (_AND, 0, 0, flags), (_JUMP_EQUAL, 0, 1, flags), _REFUSE, _PERMIT]


@functools.cache
def encoded_filter(*, own_pid: int | None, shares_files: bool) -> bytes:
    """The filter of this machine as the kernel reads it."""
    program = filter_program(platform.machine(), own_pid=own_pid, shares_files=shares_files)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def restrict(libc: ctypes.CDLL, *, shares_files: bool) -> None:
    """Apply the filter to the calling process, which must have set PR_SET_NO_NEW_PRIVS."""
    # Building the filter takes a millisecond, so the parent builds it once, with a process id to replace.
    template, any_pid = encoded_filter(own_pid=_ANY_PID, shares_files=shares_files), struct.pack("<I", _ANY_PID)
    code = template.replace(any_pid, struct.pack("<I", os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    check(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0), "seccomp")


def prepare(*, shares_files: bool) -> None:
    """Build the filter that `restrict` will apply in children of this process."""
    encoded_filter(own_pid=_ANY_PID, shares_files=shares_files)
