"""Whether a process still runs. A zombie does not: nobody has reaped it, as in a container without an init process."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
