"""seccomp denies system calls to a process and its descendants. The tables have their numbers on x86-64 and ARM64.

A number of None means that the architecture does not have the call.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import struct
import sys
from collections.abc import Iterable

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_NEW_NAMESPACES = 0x7E020000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: the index of its system call numbers, and its AUDIT_ARCH constant."""
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AT_NUMBER, _AT_ARCHITECTURE, _AT_ARGUMENTS = 0, 4, (16, 24, 32, 40)
"""Offsets into what a filter sees of a call. It loads the lower half of each argument."""
_X32 = 0x40000000
_ANY_PID = 0x7EADBEEF
"""No process has this id."""

Instruction = tuple[int, int, int, int]
_REFUSE: Instruction = (_RETURN, 0, 0, _ERRNO | _EPERM)
_PERMIT: Instruction = (_RETURN, 0, 0, _ALLOW)


def load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


Numbers = tuple[int | None, int | None]

ALWAYS: dict[str, Numbers] = {
    # network, passing descriptors, and io_uring, which bypasses the filter
    "socket": (41, 198), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "process_madvise": (440, 440),
    "process_mrelease": (448, 448), "setpriority": (141, 140), "ioprio_set": (251, 30),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that no limit of a process counts, and objects that outlive the process
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "shmdt": (67, 197),
    "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "mq_timedsend": (242, 182), "mq_timedreceive": (243, 183),
    "mq_notify": (244, 184), "mq_getsetattr": (245, 185),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # watching files, and opening them without a path
    "inotify_init": (253, None), "inotify_init1": (294, 26), "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467), "statmount": (457, 457), "listmount": (458, 458),
    # the system
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "vhangup": (153, 58),
    "sync": (162, 81), "syncfs": (306, 267), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
}  # fmt: skip
"""Denied under every confinement."""

ON_FILES_OF_THE_SERVER: dict[str, Numbers] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "file_setattr": (469, 469), "truncate": (76, 45),
}  # fmt: skip
"""Change a file by its path. Landlock restricts none of them (truncate only since Linux 6.2), and seccomp cannot see a
path. They are denied where the program runs as the server's user and sees the server's files."""

ON_PROCESSES_OF_THE_SERVER: dict[str, Numbers] = {"setsid": (112, 157), "setpgid": (109, 154)}
"""Leave the process group, which the sandbox kills as a whole. Denied where the program shares the process ids of the
server."""

ON_ITSELF_ONLY: dict[str, Numbers] = {"kill": (62, 129), "tgkill": (234, 131)}
"""Take a process id first. Allowed on the program itself where it shares the process ids of the server."""

ON_PID_ZERO_ONLY: dict[str, Numbers] = {"prlimit64": (302, 261)}
"""Take a process id first. Zero means the caller."""

NO_SUCH_CALL: dict[str, Numbers] = {"clone3": (435, 435), "openat2": (437, 437)}
"""Take their flags in memory, which a filter cannot read. They fail with ENOSYS, and libraries fall back to calls that
the filter can check."""

CLONE: Numbers = (56, 220)
OPEN: Numbers = (2, None)
OPENAT: Numbers = (257, 56)
FCNTL: Numbers = (72, 25)
IOCTL: Numbers = (16, 29)
PRCTL: Numbers = (157, 167)
SOCKETPAIR: Numbers = (53, 199)
MMAP: Numbers = (9, 222)

FCNTL_COMMANDS = {
    "F_DUPFD": 0, "F_GETFD": 1, "F_SETFD": 2, "F_GETFL": 3, "F_SETFL": 4, "F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7,
    "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_OFD_SETLKW": 38, "F_DUPFD_CLOEXEC": 1030, "F_GETPIPE_SZ": 1032,
}  # fmt: skip
"""Allowed commands. The others send signals to any process (F_SETOWN, F_SETSIG), watch folders or take leases."""
F_SETFL, O_ASYNC = 4, 0x2000

IOCTL_REQUESTS = {
    "TCGETS": 0x5401, "TCGETS2": 0x802C542A, "TIOCGWINSZ": 0x5413, "FIONREAD": 0x541B, "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450, "FIOCLEX": 0x5451,
}  # fmt: skip
"""Allowed requests, which Python and the C library make on ordinary files and pipes."""

AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
MAP_SHARED, MAP_ANONYMOUS = 0x1, 0x20
O_ACCMODE, O_TRUNC = 0x3, 0x200
PRCTL_OPTIONS = {"PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4}
"""Refused options: outlive the reward process, and hide which files are open."""


def is_supported() -> bool:
    return sys.platform == "linux" and platform.machine() in _ARCHITECTURES


def filter_program(machine: str, *, own_pid: int | None, shares_files: bool) -> list[Instruction]:
    """BPF program over the number and arguments of a call: (code, jump if true, jump if false, operand). `own_pid` is
    the only process that the program may signal. None if it has its own process ids, and may signal all. `shares_files`
    denies changes of a file's mode, times and attributes, because the program owns files of the server."""
    column, architecture = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _AT_NUMBER), (_JUMP_AT_LEAST, 0, 1, _X32), _REFUSE,
    ]  # fmt: skip
    tables = [
        (ALWAYS, [_REFUSE]),
        (ON_PID_ZERO_ONLY, _only(0, [0])),
        (NO_SUCH_CALL, [(_RETURN, 0, 0, _ERRNO | _ENOSYS)]),
        ({"clone": CLONE}, _unless(0, _JUMP_SET, _NEW_NAMESPACES)),
        ({"open": OPEN}, _open_rule(1)),
        ({"openat": OPENAT}, _open_rule(2)),
        ({"ioctl": IOCTL}, _only(1, IOCTL_REQUESTS.values())),
        ({"fcntl": FCNTL}, _fcntl_rule()),
        ({"socketpair": SOCKETPAIR}, _socketpair_rule()),
        ({"mmap": MMAP}, _mmap_rule()),
    ]
    if shares_files:
        tables.append((ON_FILES_OF_THE_SERVER, [_REFUSE]))
    if own_pid is not None:
        tables += [
            (ON_PROCESSES_OF_THE_SERVER, [_REFUSE]),
            (ON_ITSELF_ONLY, _only(0, [own_pid])),
            ({"prctl": PRCTL}, _unless(0, _JUMP_EQUAL, *PRCTL_OPTIONS.values())),
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
    set_flags = _unless(2, _JUMP_SET, O_ASYNC)
    return [
        (_LOAD, 0, 0, _AT_ARGUMENTS[1]), (_JUMP_EQUAL, 0, len(set_flags), F_SETFL), *set_flags,
        *_only(1, FCNTL_COMMANDS.values()),
    ]  # fmt: skip


def _open_rule(argument: int) -> list[Instruction]:
    """Refuse flags that change a file without the right to write it: truncation of a file that is opened for reading,
    which Landlock restricts only since Linux 6.2, and access mode 3, which it never restricts."""
    access, truncate = O_ACCMODE, O_TRUNC
    tests = [step for value in (access, access | truncate, truncate) for step in ((_JUMP_EQUAL, 0, 1, value), _REFUSE)]
    return [(_LOAD, 0, 0, _AT_ARGUMENTS[argument]), (_AND, 0, 0, access | truncate), *tests, _PERMIT]


def _socketpair_rule() -> list[Instruction]:
    """Permit pairs of Unix streams, which stay connected to each other. A datagram socket of a pair can send to every
    Unix socket of the machine."""
    return [
        (_LOAD, 0, 0, _AT_ARGUMENTS[0]), (_JUMP_EQUAL, 1, 0, AF_UNIX), _REFUSE,
        (_LOAD, 0, 0, _AT_ARGUMENTS[1]), (_AND, 0, 0, SOCK_TYPE_MASK),
        (_JUMP_EQUAL, 1, 0, SOCK_STREAM), _REFUSE, _PERMIT,
    ]  # fmt: skip


def _mmap_rule() -> list[Instruction]:
    """Refuse shared memory without a file. It stays until its last page is unmapped, and no limit of a process counts
    the pages that are unmapped before."""
    flags = MAP_SHARED | MAP_ANONYMOUS
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
