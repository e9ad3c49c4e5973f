"""seccomp denies system calls to a process and its descendants."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence

from penstock_rollout.rewards.sandbox.system_calls import check

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_REFUSED = {
    # network, and io_uring, which bypasses the filter
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "process_madvise": (440, 440),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118), "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # leaving the process group, which the sandbox kills as a whole
    "setsid": (112, 157), "setpgid": (109, 154),
    # objects that outlive the process
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # the system
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "mount_setattr": (442, 442), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "reboot": (169, 142), "swapon": (167, 224),
}  # fmt: skip
"""Denied system calls, with their numbers on x86-64 and ARM64. They fail with EPERM."""
_ON_ITSELF_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}
_ON_PID_ZERO_ONLY = {"prlimit64": (302, 261)}
_CLONE, _CLONE3 = (56, 220), 435
_NEW_NAMESPACES = 0x7E020000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the index of its system call numbers above, and its AUDIT_ARCH constant."""
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AT_NUMBER, _AT_ARCHITECTURE, _AT_FIRST_ARGUMENT = 0, 4, 16
_X32 = 0x40000000

Instruction = tuple[int, int, int, int]


def is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() in _ARCHITECTURES


def filter_program(machine: str, pid: int) -> list[Instruction]:
    """BPF program over the number and first argument of a call: (code, jump if true, jump if false, operand).

    `pid` is the only process that the program may signal: itself."""
    column, architecture = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER), (_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _EPERM),
    ]  # fmt: skip
    for numbers in _REFUSED.values():
        program += _when(numbers[column], [(_RETURN, 0, 0, _ERRNO | _EPERM)])
    for calls, value in ((_ON_ITSELF_ONLY, pid), (_ON_PID_ZERO_ONLY, 0)):
        for numbers in calls.values():
            program += _when(numbers[column], _by_first_argument(_JUMP_EQUAL, value, if_true=_ALLOW))
    program += _when(_CLONE[column], _by_first_argument(_JUMP_SET, _NEW_NAMESPACES, if_true=_ERRNO | _EPERM))
    # clone3 takes its flags in memory, which a filter cannot read. After ENOSYS the C library falls back to clone.
    program += _when(_CLONE3, [(_RETURN, 0, 0, _ERRNO | _ENOSYS)])
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _when(number: int, then: Sequence[Instruction]) -> list[Instruction]:
    return [(_JUMP_EQUAL, 0, len(then), number), *then]


def _by_first_argument(test: int, operand: int, *, if_true: int) -> list[Instruction]:
    otherwise = _ERRNO | _EPERM if if_true == _ALLOW else _ALLOW
    return [
        (_LOAD, 0, 0, _AT_FIRST_ARGUMENT), (test, 0, 1, operand), (_RETURN, 0, 0, if_true), (_RETURN, 0, 0, otherwise),
    ]  # fmt: skip


def restrict(libc: ctypes.CDLL) -> None:
    """Apply the filter to the calling process, which must have set PR_SET_NO_NEW_PRIVS."""
    program = filter_program(platform.machine(), os.getpid())
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    check(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0), "seccomp")
