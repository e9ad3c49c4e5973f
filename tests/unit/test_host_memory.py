"""Memory of the machine, or of a container with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.machine import HostMemory, measure_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:          10 kB\nMemAvailable:    600 kB\n"


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text(MEMINFO)
    return tmp_path / "meminfo"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, HostMemory(600 * 1024, 1000 * 1024)),
        ({"memory.max": "max", "memory.current": "5", "memory.stat": ""}, HostMemory(600 * 1024, 1000 * 1024)),
        (
            {"memory.max": "102400", "memory.current": "80000", "memory.stat": "anon 1\ninactive_file 7600\n"},
            HostMemory(30000, 102400),
        ),
        ({"memory.max": "102400", "memory.current": "102500", "memory.stat": ""}, HostMemory(0, 102400)),
        (
            {
                "memory/memory.limit_in_bytes": "102400",
                "memory/memory.usage_in_bytes": "2400",
                "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 400\n",
            },
            HostMemory(100400, 102400),
        ),
    ],
    ids=["no container", "no limit", "limit", "over the limit", "limit of version 1"],
)
def test_memory_of_a_machine_or_a_container(
    meminfo: Path, tmp_path: Path, files: dict[str, str], found: HostMemory
) -> None:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert measure_memory(meminfo, tmp_path / "cgroup") == found


def test_a_system_that_does_not_tell_its_memory(tmp_path: Path) -> None:
    assert measure_memory(tmp_path / "meminfo", tmp_path) is None


def test_a_container_with_less_left_than_its_limit_uses_what_the_machine_has(meminfo: Path, tmp_path: Path) -> None:
    for name, text in (("memory.max", "819200"), ("memory.current", "0"), ("memory.stat", "")):
        (tmp_path / name).write_text(text)
    assert measure_memory(meminfo, tmp_path) == HostMemory(600 * 1024, 819200)
