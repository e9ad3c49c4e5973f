"""The system call numbers of the sandbox, on both architectures, compared with the kernel's headers where installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock_rollout.rewards.sandbox import landlock, seccomp

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
            return {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)", path.read_text())}
    pytest.skip(f"no kernel headers for {machine}; apt-get install linux-libc-dev")


def sandbox_numbers(machine: str) -> dict[str, int]:
    """Every call that a rule names, for one architecture."""
    column = seccomp._ARCHITECTURES[machine][0]
    calls = seccomp._REFUSED | seccomp._ON_ITSELF_ONLY | seccomp._ON_PID_ZERO_ONLY | {"clone": seccomp._CLONE}
    return {name: numbers[column] for name, numbers in calls.items()} | {
        "clone3": seccomp._CLONE3,
        "landlock_create_ruleset": landlock._LANDLOCK_CREATE,
        "landlock_add_rule": landlock._LANDLOCK_ADD,
        "landlock_restrict_self": landlock._LANDLOCK_RESTRICT,
    }


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_are_those_of_the_kernel(machine: str) -> None:
    kernel = kernel_numbers(machine)
    known = {name: number for name, number in sandbox_numbers(machine).items() if name in kernel}
    assert known == {name: kernel[name] for name in known}
    # Headers that are older than a call do not list it. The oldest calls of all must be there, or nothing was compared.
    assert {"socket", "ptrace", "kill", "clone", "mount"} <= known.keys()


def verdict(machine: str, call: int, argument: int = 0, architecture: int | None = None) -> int:
    """Run the filter as the kernel does, for a process whose id is 77."""
    data = {0: call, 4: architecture or seccomp._ARCHITECTURES[machine][1], 16: argument}
    program, at, loaded = seccomp.filter_program(machine, pid=77), 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        if code == seccomp._RETURN:
            return operand
        if code == seccomp._LOAD:
            loaded = data[operand]
            at += 1
            continue
        holds = {
            seccomp._JUMP_EQUAL: loaded == operand,
            seccomp._JUMP_AT_LEAST: loaded >= operand,
            seccomp._JUMP_SET: bool(loaded & operand),
        }[code]
        at += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize("machine", HEADERS)
def test_the_filter_refuses_and_allows_on_either_architecture(machine: str) -> None:
    numbers = sandbox_numbers(machine)
    refused, no_such_call, allowed = seccomp._ERRNO | 1, seccomp._ERRNO | 38, seccomp._ALLOW
    for name in seccomp._REFUSED:
        assert verdict(machine, numbers[name]) == refused, name
    for name in ("kill", "tgkill"):
        assert verdict(machine, numbers[name], 77) == allowed, "signals to itself"
        assert verdict(machine, numbers[name], 78) == refused
    assert verdict(machine, numbers["prlimit64"], 0) == allowed
    assert verdict(machine, numbers["prlimit64"], 78) == refused
    assert verdict(machine, numbers["clone"], 0x11) == allowed, "fork"
    assert verdict(machine, numbers["clone"], 0x10000000) == refused, "a user namespace"
    assert verdict(machine, numbers["clone3"]) == no_such_call, "the C library falls back to clone"
    for name, number in {"x86_64": {"read": 0, "openat": 257}, "aarch64": {"read": 63, "openat": 56}}[machine].items():
        assert verdict(machine, number) == allowed, name
    other = "aarch64" if machine == "x86_64" else "x86_64"
    assert verdict(machine, 0, architecture=seccomp._ARCHITECTURES[other][1]) == seccomp._KILL
