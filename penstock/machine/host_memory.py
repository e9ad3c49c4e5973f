"""Memory that a process can still use: that of its machine, or less if its container has a limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_GROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files of a container's control group, of version 2 and of version 1, and the name of its reclaimable cache."""


@dataclass(frozen=True)
class HostMemory:
    available_bytes: int
    size_bytes: int


def measure_memory(meminfo: Path = _MEMINFO, groups: Path = _GROUPS) -> HostMemory | None:
    """Measure the memory. None where the kernel does not tell it (macOS)."""
    try:
        numbers = _numbers(meminfo)
        host = HostMemory(numbers["MemAvailable"] * 1024, numbers["MemTotal"] * 1024)
    except (OSError, KeyError):
        return None
    for limit_name, usage_name, stat_name, cache_name in _GROUP_FILES:
        try:
            limit, usage = (groups / limit_name).read_text().strip(), int((groups / usage_name).read_text())
            cache = _numbers(groups / stat_name).get(cache_name, 0)
        except OSError:
            continue
        if limit.isdigit() and int(limit) < host.size_bytes:
            left = max(0, int(limit) - (usage - cache))
            return HostMemory(min(host.available_bytes, left), int(limit))
    return host


def _numbers(path: Path) -> dict[str, int]:
    """Number of each line that begins with a name, a space or a colon, and a number."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
