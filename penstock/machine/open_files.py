"""The limit on open files of a process that has a connection for each client or server."""

from __future__ import annotations

import contextlib
import resource

MAX_FILES = 65_536


def raise_file_limit() -> None:
    """Allow as many open files as the system permits, up to MAX_FILES: every connection is one, and the usual limit is
    1,024. Never lowers the limit, and never fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
