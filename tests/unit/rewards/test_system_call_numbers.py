"""The system call numbers of the sandbox, on both architectures, compared with the kernel's headers where installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_rollout.rewards.sandbox import builtin, seccomp

HEADERS = {
    "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", "asm/unistd_64.h"),
    # aarch64 takes its numbers from the generic table.
    "aarch64": ("asm-generic/unistd.h",),
}
"""Candidates below /usr/include. Debian: linux-libc-dev."""


def kernel_numbers(machine: str) -> dict[str, int]:
    for candidate in HEADERS[machine]:
        path = Path("/usr/include") / candidate
        if path.is_file():
            # The generic table calls some calls __NR3264_, because 32-bit machines have another form of them.
            found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", path.read_text())
            return {name: int(number) for name, number in found}
    pytest.skip(f"no kernel headers for {machine}; apt-get install linux-libc-dev")


REFUSED = seccomp.ALWAYS | seccomp.ON_FILES_OF_THE_SERVER | seccomp.ON_PROCESSES_OF_THE_SERVER


def sandbox_numbers(machine: str) -> dict[str, int]:
    """Every call that a rule names and that the architecture has."""
    column = seccomp._ARCHITECTURES[machine][0]
    calls = REFUSED | seccomp.ON_ITSELF_ONLY | seccomp.ON_PID_ZERO_ONLY | seccomp.NO_SUCH_CALL
    calls |= {
        "clone": seccomp.CLONE, "open": seccomp.OPEN, "openat": seccomp.OPENAT,
        "fcntl": seccomp.FCNTL, "ioctl": seccomp.IOCTL, "prctl": seccomp.PRCTL,
        "socketpair": seccomp.SOCKETPAIR, "mmap": seccomp.MMAP,
    }  # fmt: skip
    known = {name: number for name, numbers in calls.items() if (number := numbers[column]) is not None}
    return known | {
        "landlock_create_ruleset": builtin._LANDLOCK_CREATE,
        "landlock_add_rule": builtin._LANDLOCK_ADD,
        "landlock_restrict_self": builtin._LANDLOCK_RESTRICT,
    }


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    kernel = kernel_numbers(machine)
    known = {name: number for name, number in sandbox_numbers(machine).items() if name in kernel}
    assert known == {name: kernel[name] for name in known}
    # Headers that are older than a call do not list it. The oldest calls of all must be there, or nothing was compared.
    assert {"socket", "ptrace", "kill", "clone", "mount"} <= known.keys()


def verdict(machine: str, call: int, *arguments: int, architecture: int | None = None, isolated: bool = False) -> int:
    """Run the filter as the kernel does, for a process whose id is 77, or for one in namespaces of its own."""
    data = {0: call, 4: architecture or seccomp._ARCHITECTURES[machine][1], 16: 0, 24: 0, 32: 0, 40: 0}
    data |= dict(zip(seccomp._AT_ARGUMENTS, arguments, strict=False))
    program = seccomp.filter_program(machine, own_pid=None if isolated else 77, shares_files=not isolated)
    at = loaded = 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == seccomp._RETURN:
            return operand
        if code == seccomp._LOAD:
            loaded = data[operand]
        elif code == seccomp._AND:
            loaded &= operand
        else:
            holds = {
                seccomp._JUMP_EQUAL: loaded == operand,
                seccomp._JUMP_AT_LEAST: loaded >= operand,
                seccomp._JUMP_SET: bool(loaded & operand),
            }[code]
            at += if_true if holds else if_false


REFUSE, NO_SUCH_CALL, ALLOW = seccomp._ERRNO | 1, seccomp._ERRNO | 38, seccomp._ALLOW


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_refuses_and_allows_on_either_architecture(machine: str) -> None:
    numbers = sandbox_numbers(machine)
    for name in REFUSED.keys() & numbers.keys():
        assert verdict(machine, numbers[name]) == REFUSE, name
    for name in ("kill", "tgkill"):
        assert verdict(machine, numbers[name], 77) == ALLOW, "signals to itself"
        assert verdict(machine, numbers[name], 78) == REFUSE
    assert verdict(machine, numbers["prlimit64"], 0) == ALLOW
    assert verdict(machine, numbers["prlimit64"], 78) == REFUSE
    assert verdict(machine, numbers["clone"], 0x11) == ALLOW, "fork"
    assert verdict(machine, numbers["clone"], 0x10000000) == REFUSE, "a user namespace"
    assert verdict(machine, numbers["clone3"]) == NO_SUCH_CALL, "the C library falls back to clone"
    assert verdict(machine, numbers["prctl"], 1) == REFUSE, "the signal that ends it with its parent"
    assert verdict(machine, numbers["prctl"], 4) == REFUSE, "hiding what it has open"
    assert verdict(machine, numbers["prctl"], 15) == ALLOW, "the name of a thread"
    for name, number in {"x86_64": {"read": 0, "openat": 257}, "aarch64": {"read": 63, "openat": 56}}[machine].items():
        assert verdict(machine, number) == ALLOW, name
    other = "aarch64" if machine == "x86_64" else "x86_64"
    assert verdict(machine, 0, architecture=seccomp._ARCHITECTURES[other][1]) == seccomp._KILL
    assert verdict(machine, 0x40000000 + numbers["openat"]) == REFUSE, "the x32 interface"


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_sees_commands_and_flags(machine: str) -> None:
    numbers = sandbox_numbers(machine)
    for command, flags, expected in (
        (2, 1, ALLOW), (4, 0o4000, ALLOW), (4, 0o20000, REFUSE), (4, 0o24000, REFUSE), (8, 78, REFUSE),
        (10, 9, REFUSE), (15, 0, REFUSE), (1026, 0, REFUSE), (1024, 0, REFUSE), (1030, 0, ALLOW), (6, 0, ALLOW),
    ):  # fmt: skip
        assert verdict(machine, numbers["fcntl"], 3, command, flags) == expected, (command, flags)
    for request, expected in ((0x5401, ALLOW), (0x5421, ALLOW), (0x5452, REFUSE), (0x8901, REFUSE), (0x5412, REFUSE)):
        assert verdict(machine, numbers["ioctl"], 0, request) == expected, hex(request)
    for flags in (0, 0o1101, 0o1002):
        assert verdict(machine, numbers["openat"], 0, 0, flags) == ALLOW, oct(flags)
    for flags in (0o1000, 3, 0o1003):
        assert verdict(machine, numbers["openat"], 0, 0, flags) == REFUSE, oct(flags)
    for family, kind, expected in (
        (1, 1, ALLOW),
        (1, 0o2000001, ALLOW),
        (1, 2, REFUSE),
        (1, 5, REFUSE),
        (30, 1, REFUSE),
    ):
        assert verdict(machine, numbers["socketpair"], family, kind) == expected, (family, kind)
    for flags, expected in ((0x22, ALLOW), (0x01, ALLOW), (0x02, ALLOW), (0x21, REFUSE), (0x23, REFUSE)):
        assert verdict(machine, numbers["mmap"], 0, 4096, 3, flags) == expected, hex(flags)


@pytest.mark.parametrize("machine", HEADERS)
def test_in_namespaces_of_its_own_a_program_may_do_what_harms_only_itself(machine: str) -> None:
    numbers = sandbox_numbers(machine)
    for name in ("kill", "setsid", "fchmod", "fchmodat", "utimensat"):
        assert verdict(machine, numbers[name], 78, isolated=True) == ALLOW, name
    for name in seccomp.ALWAYS.keys() & numbers.keys():
        assert verdict(machine, numbers[name], isolated=True) == REFUSE, name
