"""Starts the dead processes of a local run again, as Kubernetes does for the processes of a cluster."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.errors import ProcessDied
from penstock_services.local.processes import Child, ProcessGroup

BACK_OFF_S = 1.0
"""Wait before the first restart of a process. It doubles with each further one, up to BACK_OFF_CAP_S."""
BACK_OFF_CAP_S = 60.0
WRONG_INPUT = 2
"""Exit code for a wrong config or wrong data, such as a dataset of which every prompt was dead-lettered."""
HEALTHY_S = 600.0
"""A process that has run for this long has all its restarts again."""


@dataclass(frozen=True)
class Restart:
    """A process has ended and will be started again."""

    name: str
    text: str
    """One line that says how it ended."""
    delay_s: float
    number: int
    """1 for the first restart."""


class Restarts:
    """Starts children again that were killed, or that ended after they were ready.

    A child that ends during its start, or with WRONG_INPUT, would do so again. Its end is the end of the run,
    and so is that of a child which is not in `names`, or which has used up its restarts."""

    def __init__(
        self, processes: ProcessGroup, names: Sequence[str], max_restarts: int, was_ready: Callable[[Child], bool]
    ) -> None:
        self.processes = processes
        self.names = names
        self.max_restarts = max_restarts
        self.was_ready = was_ready
        self._num_restarts: Counter[str] = Counter()
        """Restarts of each child since it last ran for HEALTHY_S."""
        self._due_at: dict[str, float] = {}
        """When the children that wait for their restart are started."""
        self.ended: dict[str, str] = {}
        """The children that are not ready again, each with one line that says how it ended."""

    def check(self, may_finish: Sequence[str] = ()) -> list[Restart]:
        """Start the children whose wait is over, and return those that have ended since the last call. Raises
        ProcessDied for a child that is not started again."""
        found = []
        for child in self.processes.ended(may_finish):
            if child.name not in self._due_at:
                found.append(self._plan(child))
            elif time.monotonic() >= self._due_at[child.name]:
                del self._due_at[child.name]
                self.processes.start_again(child)
        for child in self.processes.children:
            if child.name in self.ended and child.exit_code is None and self.was_ready(child):
                del self.ended[child.name]
        return found

    def _plan(self, child: Child) -> Restart:
        if time.time() - child.started_at > HEALTHY_S:
            self._num_restarts[child.name] = 0
        done = self._num_restarts[child.name]
        is_lasting = child.exit_code == WRONG_INPUT or not (child.was_killed or self.was_ready(child))
        if child.name not in self.names or is_lasting:
            raise child.error()
        if done >= self.max_restarts:
            raise ProcessDied(f"{child.error()}; max_restarts is {done}") if done else child.error()
        self._num_restarts[child.name] = done + 1
        delay_s = min(BACK_OFF_CAP_S, BACK_OFF_S * 2**done)
        self._due_at[child.name] = time.monotonic() + delay_s
        self.ended[child.name] = str(child.error())
        return Restart(child.name, self.ended[child.name], delay_s, done + 1)
