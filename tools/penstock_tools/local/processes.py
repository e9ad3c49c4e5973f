"""The processes of a local run: started, checked, started again and ended together.

On Linux this process adopts the orphans of its children (subreaper). If it is killed, `orphan_cleanup.py` ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import psutil

from penstock.api.records import Server
from penstock.config.gpu_bundles import num_gpus
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, ProcessDied
from penstock_tools.local.orphan_cleanup import GRACE_S, OrphanCleanup

QUIET_S = 3.0
"""A child that takes longer than this to end is mentioned."""
STILL_AFTER_S = 15.0
"""One that still has not ended is mentioned again after each further time of this length."""
END_POLL_S = 0.05
BACK_OFF_S = 1.0
"""Wait before the first restart of a process. It doubles with each further one, up to BACK_OFF_CAP_S."""
BACK_OFF_CAP_S = 60.0
WRONG_INPUT = 2
"""Exit code for a wrong config or wrong data, such as a dataset of which every prompt was dead-lettered."""
HEALTHY_S = 600.0
"""A process that has run for this long has all its restarts again."""
ORPHANS_S = 60.0
"""How long a start waits for the processes of a run whose supervisor was killed."""
VARIABLE = "CUDA_VISIBLE_DEVICES"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    stop_timeout_s: float
    log_start: int = 0
    """Size of the log when the process was started. A restarted run appends to the same log."""
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    ends_last: bool = False
    work_at_end: Callable[[], str] = lambda: ""
    """What a process that takes a while to end does, in a few words; empty if that is not known."""
    why_killed: str = ""
    """Why the supervisor has killed the process; empty if it has not."""

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal such as SIGSTOP holds the process."""
        try:
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return False

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process. Some processes catch SIGTERM and exit with 128 + its number."""
        code = self.process.returncode
        return code is not None and (code < 0 or code > 128)

    def has_written(self, endpoint: Path) -> bool:
        """Whether the file with its address is of this process. A rollout server writes it once its engine is up."""
        return endpoint.exists() and endpoint.stat().st_mtime >= self.started_at

    def error(self) -> ConfigError | ProcessDied:
        """Describe in one line how the process ended, its last error message, and where its log is. A ConfigError if
        it ended with WRONG_INPUT."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        how = self.why_killed or how
        last_line = last_error_line(self.log, self.log_start)
        kind = ConfigError if code == WRONG_INPUT else ProcessDied
        return kind(f"{self.name} {how}{': ' + last_line if last_line else ''} (log: {self.log})")


def last_error_line(log: Path, start: int = 0) -> str:
    """Return the last error in a log after byte `start`, without its prefix; empty if there is none."""
    try:
        lines = log.read_bytes()[start:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    newest = lines[-200:][::-1]
    errors = (line.split("error: ", 1)[1] for line in newest if "error: " in line)
    exceptions = (line for line in newest if "Error: " in line)
    return next(errors, next(exceptions, "")).strip()


def try_lock(folder: Path, taken: str) -> IO[str] | None:
    """Lock a run's folder for this supervisor. None if another one was killed and its processes are still ending.
    Raises ConfigError with the text `taken` if the other one lives."""
    lock = (folder / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with lock:
            lock.seek(0)
            holder = lock.read().strip()
        if holder.isdigit() and not psutil.pid_exists(int(holder)):
            return None
        raise ConfigError(taken) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


class ProcessGroup:
    """All children of one run, in the order of their start."""

    def __init__(self, log_folder: Path, held_file: IO[str] | None = None, orphan_grace_s: float = GRACE_S) -> None:
        """`held_file` stays open, and its lock held, while a process of the run lives, even if this one is killed."""
        self.log_folder = log_folder
        self.held_file = held_file
        self.orphan_grace_s = orphan_grace_s
        self.on_wait: Callable[[str], None] = lambda _: None
        """Called with a line about a child that takes a while to end."""
        self._at_once = threading.Event()
        self.children: list[Child] = []
        self._cleanup: OrphanCleanup | None = None
        self._others = {process.pid for process in psutil.Process().children()}
        """Children that this process had before. They do not belong to the run."""

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stop_timeout_s: float = 20,
        ends_last: bool = False,
    ) -> Child:
        """Start a child, whose output goes to `NAME.log`. If this process is killed, one that `ends_last` ends last."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if self._cleanup is None:
            self._cleanup = OrphanCleanup(self.log_folder / "cleanup.log", self.held_file, self.orphan_grace_s)
        log = self.log_folder / f"{name}.log"
        with log.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if ends_last else partial(_prctl, _PR_SET_PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509  (one system call, no lock)
                pass_fds=(self.held_file.fileno(),) if ends_last and self.held_file is not None else (),
                env={**os.environ, **(environment or {})},
            )
        self._cleanup.add(process.pid, is_last=ends_last)
        child = Child(name, process, log, stop_timeout_s, log_start, command, environment or {}, ends_last=ends_last)
        self.children.append(child)
        return child

    def ended(self, may_finish: Sequence[str] = ()) -> list[Child]:
        """The children that have ended. Children in `may_finish` may end with code 0."""
        found = []
        for child in self.children:
            code = child.exit_code
            if code is None:
                continue
            self._forget(child)
            if code != 0 or child.name not in may_finish:
                found.append(child)
        self.reap_orphans()
        return found

    def start_again(self, child: Child) -> Child:
        """Start a child that has ended again, after killing what it left, such as an engine with GPU memory."""
        self._kill_session(child.process.pid)
        self.children.remove(child)
        self._forget(child)
        return self.start(child.name, child.command, environment=child.environment, stop_timeout_s=child.stop_timeout_s)

    def kill(self, child: Child, why: str) -> None:
        """Kill a child that hangs, with its descendants. `why` follows its name in `Child.error`."""
        child.why_killed = why
        _kill(reversed(_tree(child.process.pid)))

    def _forget(self, child: Child) -> None:
        if self._cleanup is not None:
            self._cleanup.forget(child.process.pid)

    def reap_orphans(self) -> None:
        """Reap adopted processes that have ended: those in the session of a child, which others do not wait for."""
        if sys.platform != "linux":
            return
        own = {child.process.pid for child in self.children} | ({self._cleanup.pid} if self._cleanup else set())
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ChildProcessError):
                if process.pid not in own and os.getsid(process.pid) != os.getsid(0):
                    os.waitpid(process.pid, os.WNOHANG)

    def stop(self, *, together: bool = False) -> None:
        """End all children, newest first or all `together`, each with its own deadline. Then kill the processes that
        they left behind."""
        for child in self.children if together else ():
            child.process.terminate()
        for child in reversed(self.children):
            if child.exit_code is None:
                if not together:
                    child.process.terminate()
                if not self._ends_in_time(child):
                    _kill(reversed(_tree(child.process.pid)))
                    child.process.wait(10)
        self._kill_leftovers()
        if self._cleanup is not None:
            self._cleanup.close()
            self._cleanup = None

    def end_at_once(self) -> None:
        """Have `stop`, in another thread, kill what has not ended, except a child that `ends_last`: Redis must save."""
        self._at_once.set()

    def _ends_in_time(self, child: Child) -> bool:
        """Wait for the end of a child, and report what it does meanwhile. Returns whether it ended by itself."""
        limit_s, started, work, mentioned_s = child.stop_timeout_s, time.monotonic(), "", None
        while child.exit_code is None:
            waited_s = time.monotonic() - started
            if self._at_once.is_set() and not child.ends_last:
                return False
            if waited_s > limit_s:
                self.on_wait(f"{child.name} did not end in {limit_s:.0f} s and is killed (log: {child.log})")
                return False
            before, work = work, child.work_at_end()
            if mentioned_s is None:
                if waited_s >= QUIET_S:
                    self.on_wait(f"waiting for {child.name} to end, at most {limit_s:.0f} s (log: {child.log})")
                    mentioned_s, work = waited_s, ""
            elif work != before and work:
                self.on_wait(f"{child.name}: {work}")
                mentioned_s = waited_s
            elif waited_s - mentioned_s >= STILL_AFTER_S:
                self.on_wait(f"{child.name}: still {work or 'ending'}, for {waited_s:.0f} of at most {limit_s:.0f} s")
                mentioned_s = waited_s
            time.sleep(END_POLL_S)
        return True

    def _kill_session(self, leader: int) -> None:
        left = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                if os.getsid(process.pid) == leader:
                    left.append(process)
        _kill(left)
        psutil.wait_procs(left, timeout=10)

    def _kill_leftovers(self) -> None:
        deadline = time.monotonic() + 10
        spared = self._others | ({self._cleanup.pid} if self._cleanup else set())
        while leftovers := [
            p for root in psutil.Process().children() if root.pid not in spared for p in _tree(root.pid)
        ]:
            _kill(leftovers)
            psutil.wait_procs(leftovers, timeout=2)
            if time.monotonic() > deadline:
                break


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@dataclass(frozen=True)
class Restart:
    """A process has ended and will be started again."""

    name: str
    text: str
    delay_s: float
    number: int


@dataclass
class Restarts:
    """Starts children again that were killed, or that ended after they were ready, as Kubernetes does in a cluster.

    The end of any other child ends the run: one that ends during its start or with WRONG_INPUT, is not in `names`, or
    has used up its restarts."""

    processes: ProcessGroup
    names: Sequence[str]
    max_restarts: int
    was_ready: Callable[[Child], bool]
    ended: dict[str, str] = field(default_factory=dict)
    """The children that are not ready again, each with one line that says how it ended."""
    _num_restarts: Counter[str] = field(default_factory=Counter)
    """Restarts of each child since it last ran for HEALTHY_S."""
    _due_at: dict[str, float] = field(default_factory=dict)
    """When the children that wait for their restart are started."""

    def check(self, may_finish: Sequence[str] = ()) -> list[Restart]:
        """Restart the children whose wait is over, and return the newly ended ones. Raises ProcessDied for one
        that is not started again."""
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
        delay_s = min(BACK_OFF_CAP_S, BACK_OFF_S * 2 ** min(done, 100))  # a float has no power of 1024
        self._due_at[child.name] = time.monotonic() + delay_s
        self.ended[child.name] = str(child.error())
        return Restart(child.name, self.ended[child.name], delay_s, done + 1)


class HungServers:
    """Finds rollout servers whose process is there, but sends no heartbeat.

    A server hangs if the statuses of `limit_s` in all, without one that differs, showed it without a recent heartbeat.
    A time without a status counts as `recent_s` at most, because after Redis was away all heartbeats are old for a
    moment. A stopped process hangs as soon as its heartbeat is not recent."""

    def __init__(self, recent_s: float, limit_s: float) -> None:
        self.recent_s = recent_s
        self.limit_s = limit_s
        self._updated_s = time.monotonic()
        self._silent_s: dict[str, float] = {}
        self.newly_silent: dict[str, float] = {}
        """Servers without a recent heartbeat in the two newest updates, which had one in the update before."""

    def update(
        self, servers: Sequence[Server] | None, may_hang: Collection[str], stopped: Collection[str] = ()
    ) -> dict[str, float]:
        """The servers that hang, with the seconds since their last heartbeat. `servers` is None if the status is
        unknown. Only servers in `may_hang` count; servers in `stopped` have a stopped process."""
        self.newly_silent = {}
        if servers is None:
            return {}
        now_s = time.monotonic()
        passed_s, self._updated_s = min(now_s - self._updated_s, self.recent_s), now_s
        silent = {
            server.server_id: server.heartbeat_age_ms / 1000
            for server in servers
            if server.server_id in may_hang and server.heartbeat_age_ms > 1000 * self.recent_s
        }
        before = self._silent_s
        self._silent_s = {name: before[name] + passed_s if name in before else 0.0 for name in silent}
        self.newly_silent = {name: age_s for name, age_s in silent.items() if before.get(name) == 0}
        return {
            name: age_s
            for name, age_s in silent.items()
            if self._silent_s[name] > (0 if name in stopped else self.limit_s)
        }


def divide_gpus(config: RunConfig, gpus: Sequence[str]) -> dict[str, dict[str, str]]:
    """The environment of each process: the learner has the first GPUs, then each rollout server its own. Empty if there
    are too few GPUs: then all processes see and share all of them."""
    learner, rollout = config.learner, config.rollout
    num_for_learner = 0 if learner.ray_address else num_gpus(learner.placement, learner.needed_roles)
    servers = gpus_of_servers(rollout.num_servers, rollout.engine.tensor_parallel_size, gpus[num_for_learner:])
    if not gpus or len(servers) < rollout.num_servers or num_for_learner > len(gpus):
        return {}
    divided = {"learner": {VARIABLE: ",".join(gpus[:num_for_learner])}} if num_for_learner else {}
    return divided | {f"rollout-{index}": server for index, server in enumerate(servers)}


def gpus_of_servers(num_servers: int, num_per_server: int, gpus: Sequence[str]) -> list[dict[str, str]]:
    """The environment of each rollout server, which gives it its own GPUs. Empty if there are too few."""
    if num_servers * num_per_server > len(gpus):
        return []
    starts = range(0, num_servers * num_per_server, num_per_server)
    return [{VARIABLE: ",".join(gpus[start : start + num_per_server])} for start in starts]
