"""The parts of a soak run, each restarted as Kubernetes restarts a container, and the killer that hits them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from harness import sized
from penstock_tools.local.processes import Child, ProcessGroup

BACK_OFF_S = sized(1.0, 0.1)
"""Delay of the second restart. The first one is immediate, and each further one waits twice as long."""
BACK_OFF_CAP_S = sized(10.0, 0.5)
HEALTHY_S = 120.0
"""A part that ran for this long starts again without a delay.

Doubling, cap and reset are those of a kubelet, with a `maxContainerRestartPeriod` of 10 s. With the default of 300 s, a
soak that kills every part each few minutes would mostly measure the kubelet's pauses."""
STOP_SIGNALS = ("SIGKILL", "SIGTERM", "SIGSTOP")
SIGNAL_WEIGHTS = (0.75, 0.15, 0.10)
SUSPENDED_S = sized((3.0, 10.0), (0.3, 1.0))
"""A suspended process continues after a time between these."""


@dataclass
class Part:
    """One process that is started again whenever it ends."""

    name: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    stop_timeout_s: float = 20.0
    child: Child | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    """When the part starts again, if it is down."""
    restarts: int = 0
    quick_restarts: int = 0
    """Restarts since the part last ran for HEALTHY_S."""
    waited_s: float = 0.0
    """Time spent in back-off."""

    @property
    def is_up(self) -> bool:
        return self.child is not None and self.child.exit_code is None

    def start(self, processes: ProcessGroup) -> None:
        self.child = processes.start(
            self.name, self.command, environment=self.environment, stop_timeout_s=self.stop_timeout_s
        )
        self.started_at = time.monotonic()

    def keep_up(self, processes: ProcessGroup) -> bool:
        """Start the part again if it is down and its back-off is over. Returns whether it was started."""
        now = time.monotonic()
        if self.is_up:
            return False
        if self.start_at < self.started_at:  # it has just ended
            self.quick_restarts = 0 if now - self.started_at > HEALTHY_S else self.quick_restarts
            delay_s = min(BACK_OFF_CAP_S, BACK_OFF_S * 2 ** (self.quick_restarts - 1)) if self.quick_restarts else 0.0
            self.start_at = now + delay_s
            self.waited_s += delay_s
            self.quick_restarts += 1
        if now < self.start_at:
            return False
        self.restarts += 1
        self.start(processes)
        return True

    def tree(self) -> list[psutil.Process]:
        """The process and its descendants; empty if it is down."""
        if not self.is_up:
            return []
        assert self.child is not None
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.child.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def rss_bytes(self) -> int:
        total = 0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


@dataclass(frozen=True)
class Fault:
    at: float
    part: str
    signal: str


class Killer:
    """Draws the times, targets and signals of the faults from a seed. Every target is equally likely."""

    def __init__(self, seed: int, mean_s: float, targets: dict[str, Callable[[], psutil.Process | None]]) -> None:
        self.random = random.Random(seed)
        self.mean_s = mean_s
        self.targets = targets
        self.faults: list[Fault] = []
        self.suspended: list[tuple[float, psutil.Process]] = []
        self.next_at = float("inf")

    def begin(self) -> None:
        self.next_at = time.monotonic() + self.random.expovariate(1 / self.mean_s)

    def end(self) -> None:
        self.next_at = float("inf")
        self._resume(float("inf"))

    def poll(self) -> Fault | None:
        """Send the next signal if its time has come. A target that is down is replaced by the next draw."""
        now = time.monotonic()
        self._resume(now)
        if now < self.next_at:
            return None
        part, name = self.random.choice(list(self.targets)), self.random.choices(STOP_SIGNALS, SIGNAL_WEIGHTS)[0]
        process = self.targets[part]()
        if process is None:
            return None
        self.next_at = now + self.random.expovariate(1 / self.mean_s)
        with suppress(psutil.NoSuchProcess):
            process.send_signal(getattr(signal, name))
        if name == "SIGSTOP":
            self.suspended.append((now + self.random.uniform(*SUSPENDED_S), process))
        fault = Fault(now, part, name)
        self.faults.append(fault)
        return fault

    def _resume(self, now: float) -> None:
        for entry in [entry for entry in self.suspended if entry[0] <= now]:
            self.suspended.remove(entry)
            with suppress(psutil.NoSuchProcess):
                entry[1].send_signal(signal.SIGCONT)


def root_process(part: Part) -> psutil.Process | None:
    tree = part.tree()
    return tree[0] if tree else None


_ACTIVE_S = sized(1.0, 0.1)
_ACTIVE_SHARE = 0.1
"""A rank that trains uses at least this share of a core."""


def rank_process(cluster: Part, dice: random.Random) -> psutil.Process | None:
    """One of the policy's ranks, which are workers of Ray. One that has computed nothing lately is not drawn."""
    before = _rank_seconds(cluster)
    time.sleep(_ACTIVE_S)
    after = _rank_seconds(cluster)
    busy = [
        process
        for process, seconds in after.items()
        if seconds - before.get(process, seconds) >= _ACTIVE_SHARE * _ACTIVE_S
    ]
    ranks = busy or list(after)
    return dice.choice(sorted(ranks, key=lambda process: process.pid)) if ranks else None


def _rank_seconds(cluster: Part) -> dict[psutil.Process, float]:
    """Seconds of CPU time of each rank."""
    seconds = {}
    for process in cluster.tree():
        with suppress(psutil.Error):
            if "ray::PolicyWorker" in " ".join(process.cmdline()[:1]):
                seconds[process] = sum(process.cpu_times()[:2])
    return seconds


def host_description() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}"
