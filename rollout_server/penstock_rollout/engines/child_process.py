"""How a process that an engine has started ends with the server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

PARENT_POLL_S = 0.5


def end_with_parent(parent_pid: int, end: Callable[[], None]) -> None:
    """Call `end` soon after the parent process has ended, even if it was killed. PR_SET_PDEATHSIG does not work here:
    it signals this process only, and fires when the thread that forked ends, which may be much earlier."""

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        end()

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()
