"""Every confinement of the sandbox refuses every attack, for a server that runs as root and for one that does not."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock_rollout.rewards.sandbox import builtin
from penstock_rollout.rewards.sandbox.program import Limits
from support.sandbox_attacks import (
    ATTACKS,
    BATCH,
    FILES,
    KNOWN_WITHOUT_NAMESPACES,
    ORDINARY_USER,
    PROCESSES,
    Server,
    ordinary_python,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")
MIN_ATTACKS = 40
RUNNER = """
import json, sys
from penstock.errors import ConfigError
from penstock_rollout.rewards.sandbox.builtin import Builtin, Layers
from penstock_rollout.rewards.sandbox.program import Limits
from penstock_rollout.rewards.sandbox.run import Sandbox
settings = json.loads(sys.stdin.buffer.readline())
try:
    sandbox = Sandbox.open("builtin" if settings["layers"] else settings["confinement"])
except ConfigError as error:
    sys.exit(f"no sandbox: {error}")
if settings["layers"]:
    sandbox = Sandbox(Builtin(Layers(**settings["layers"])), None)
limits = Limits(cpu_s=60, memory_bytes=2**30, file_bytes=2**24, folder_bytes=2**26, max_processes=16)
outcome = sandbox.run(
    ["attack.py"], {"attack.py": settings["program"]}, sys.stdin.buffer.read(), limits, wall_s=180, output_bytes=2**20
)
sys.stdout.write(outcome.stdout.decode())
sys.stderr.write(outcome.error_tail.decode())
"""


def servers() -> list[Server]:
    own = Server(os.geteuid(), sys.executable)
    return [own] if own.user else [own, Server(ORDINARY_USER, ordinary_python())]


@dataclass
class Victims:
    """What the attacks try to harm: a folder, a process and sockets for each attack, all of the server's user."""

    server: Server
    folder: Path
    of: dict[str, dict[str, Any]] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def add(self, name: str, shared: dict[str, Any]) -> None:
        number = len(self.of)
        victim: dict[str, Any] = {
            **shared,
            "sleep": f"999.{os.getpid()}{number}",
            "queue": f"penstock-{os.getpid()}-{number}",
        }
        folder = self.folder / str(number)
        folder.mkdir(mode=0o700)
        file = folder / "file"
        file.write_text("secret")
        file.chmod(0o600)
        with contextlib.suppress(OSError):
            os.setxattr(file, "user.mark", b"x")
        os.utime(file, (10**9, 10**9))
        for path in (folder, file):
            os.chown(path, self.server.user, self.server.user if self.server.user else -1)
        if name in PROCESSES:
            self.processes[name] = self.server.start("/bin/sleep", victim["sleep"], start_new_session=True)
            victim["pid"] = self.processes[name].pid
        self.of[name] = victim | {"folder": str(folder), "file": str(file)}

    def harmed(self) -> set[str]:
        """Attacks whose victim has changed, whatever the attack reported."""
        found = set()
        for name, victim in self.of.items():
            folder, file = Path(victim["folder"]), Path(victim["file"])
            try:
                status = file.stat()
                is_whole = (
                    file.read_text() == "secret" and status.st_mode & 0o777 == 0o600
                    and status.st_mtime == 10**9 and folder.stat().st_mode & 0o777 == 0o700
                    and list(folder.iterdir()) == [file] and "user.harm" not in _attributes(file)
                )  # fmt: skip
            except OSError:  # it is gone, or its owner, an ordinary user, may not even read it any more
                is_whole = False
            if not is_whole or (name in self.processes and self.processes[name].poll() is not None):
                found.add(name)
        if (self.folder / "escaped").exists():
            found.add("write to /tmp of the host")
        if self._survivors():
            found.add("outlive the sandbox")
        return found

    def _survivors(self) -> list[int]:
        """Processes that the attack left behind: they sleep as long as their victim, and are not the victim."""
        word, own = self.of["outlive the sandbox"]["sleep"].encode(), self.processes["outlive the sandbox"].pid
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if word in path.read_bytes().split(b"\0") and int(path.parent.name) != own:
                    found.append(int(path.parent.name))
        return found

    def close(self) -> None:
        for pid in self._survivors():
            os.kill(pid, 9)
        for process in self.processes.values():
            process.kill()
            process.wait()


def _attributes(file: Path) -> list[str]:
    try:
        return os.listxattr(file)
    except OSError:
        return []


SHARED_MEMORY = """
import ctypes, sys
libc = ctypes.CDLL(None)
print(libc.shmget(0, 4096, 0o1600) if sys.argv[1] == "make" else libc.shmctl(int(sys.argv[2]), 0, None))
"""


@contextlib.contextmanager
def make_victims(server: Server) -> Iterator[Victims]:
    # Not tmp_path: its parents are closed to other users.
    folder = Path(tempfile.mkdtemp(prefix="penstock-victims-"))
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "socket"))
        unix.listen()
        (folder / "socket").chmod(0o777)
        with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
            abstract.bind(f"\0{folder / 'socket'}")
            abstract.listen()
            datagrams.bind(str(folder / "datagrams"))
            (folder / "datagrams").chmod(0o777)
            victims = Victims(server, folder)
            segments = []
            try:
                for name in ATTACKS:
                    shared = {"port": listener.getsockname()[1], "socket": str(folder / "socket")}
                    shared["datagrams"] = str(folder / "datagrams")
                    if "shared memory" in name:
                        made, _ = server.run(server.python, "-I", "-c", SHARED_MEMORY, "make", stdin=b"")
                        segments.append(made.strip())
                        shared["shared_memory"] = int(made)
                    victims.add(name, shared)
                yield victims
            finally:
                victims.close()
                for segment in segments:
                    server.run(server.python, "-I", "-c", SHARED_MEMORY, "remove", segment, stdin=b"")
                for path in folder.iterdir():
                    if path.is_dir():
                        path.chmod(0o700)
                shutil.rmtree(folder)


def carry_out(
    victims: Victims, *, confinement: str | None, layers: dict[str, Any] | None = None
) -> tuple[set[str], str]:
    """Try every attack under a confinement, or without one. Returns those that succeeded, and all reports."""
    server, request = victims.server, json.dumps({"attacks": ATTACKS, "victims": victims.of}) + "\n"
    if confinement is None:
        output, errors = server.run(server.python, "-I", "-c", BATCH, stdin=request.encode())
    else:
        settings = json.dumps({"confinement": confinement, "layers": layers, "program": BATCH}) + "\n"
        output, errors = server.run(server.python, "-c", RUNNER, stdin=(settings + request).encode())
        if errors.startswith("no sandbox: "):
            pytest.skip(errors.strip())
    assert output, errors
    reports: dict[str, str] = json.loads(output)
    assert reports.keys() == ATTACKS.keys()
    bitten = {name for name, report in reports.items() if report == "succeeded"}
    if confinement is not None:
        # The sandbox shows a program other files and processes under these names, so only real harm counts.
        bitten -= {"outlive the sandbox"}
    return bitten | _settled_harm(victims), json.dumps(reports, indent=1)


def _settled_harm(victims: Victims) -> set[str]:
    """Signals arrive a moment after they were sent."""
    time.sleep(0.1)
    return victims.harmed()


@pytest.fixture(scope="module", params=["as the user of the tests", "as an ordinary user"])
def server(request: pytest.FixtureRequest) -> Server:
    found = servers()
    if request.param == "as the user of the tests":
        return found[0]
    if len(found) == 1:
        pytest.skip("only root can become another user; the tests already run as an ordinary one")
    if not found[1].python:
        pytest.skip("an ordinary user can run no interpreter of this machine")
    output, errors = found[1].run(found[1].python, "-c", "import penstock_rollout.rewards.sandbox.run", stdin=b"")
    if errors:
        pytest.skip(f"an ordinary user cannot use this checkout: {errors.splitlines()[-1]}")
    return found[1]


@pytest.fixture(scope="module")
def biting(server: Server) -> set[str]:
    """The attacks that succeed on this machine without a sandbox. A kernel may refuse some to everyone."""
    with make_victims(server) as victims:
        bitten, reports = carry_out(victims, confinement=None)
    assert len(bitten) >= MIN_ATTACKS, reports
    assert bitten >= {
        "chmod a file",
        "set the times of a file",
        "signal by F_SETOWN",
        "memory by memfd",
        "memory that no limit counts once it is unmapped",
        "send to a Unix socket from a pair",
        "watch a folder",
    }
    return bitten


def test_the_builtin_confinement_refuses_every_attack(server: Server, biting: set[str]) -> None:
    with make_victims(server) as victims:
        bitten, reports = carry_out(victims, confinement="builtin")
    assert bitten & biting <= KNOWN_WITHOUT_NAMESPACES, reports


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")
def test_bubblewrap_refuses_every_attack(server: Server, biting: set[str]) -> None:
    with make_victims(server) as victims:
        bitten, reports = carry_out(victims, confinement="bubblewrap")
    assert not bitten & biting, reports


@pytest.mark.parametrize("abi", [1, *(pytest.param(abi, marks=pytest.mark.long) for abi in (2, 3, 4)), 5])
def test_an_older_landlock_refuses_every_attack(server: Server, biting: set[str], abi: int) -> None:
    """Older kernels restrict fewer kinds of access. Namespaces are left out, as in most containers."""
    layers = {"landlock_abi": abi, "has_seccomp": True, "has_namespaces": False, "drops_user": server.user == 0}
    with make_victims(server) as victims:
        bitten, reports = carry_out(victims, confinement="builtin", layers=layers)
    assert bitten & biting <= KNOWN_WITHOUT_NAMESPACES, reports


@pytest.mark.long
def test_without_the_right_to_change_the_user_every_attack_is_refused(server: Server, biting: set[str]) -> None:
    """A container may run as root without the right to become another user."""
    layers = {"landlock_abi": 1, "has_seccomp": True, "has_namespaces": False, "drops_user": False}
    with make_victims(server) as victims:
        bitten, reports = carry_out(victims, confinement="builtin", layers=layers)
    assert bitten & biting <= KNOWN_WITHOUT_NAMESPACES, reports


MANY = """
import json, os, subprocess, sys
from penstock_rollout.rewards.sandbox import builtin, program as running
from penstock_rollout.rewards.sandbox.program import Limits
from penstock_rollout.rewards.sandbox.run import Sandbox
settings = json.load(sys.stdin)
running.MEASURE_S = 60
if settings.get("counts_after_output"):
    count = running.RunningProgram.has_too_many_processes
    running.RunningProgram.has_too_many_processes = lambda self: bool(self._written) and count(self)
num_threads = builtin._num_threads_of(os.getuid())
later = [subprocess.Popen(["/bin/sleep", "120"]) for _ in range(settings["num_later"])]
builtin._num_threads_of = lambda user: num_threads  # as if the others had started after this count
sandbox = Sandbox(builtin.Builtin(builtin.Layers(1, has_seccomp=True, has_namespaces=False, drops_user=False)), None)
limits = Limits(cpu_s=20, memory_bytes=2**30, file_bytes=2**20, folder_bytes=2**22, max_processes=8)
program = f'''
import os, time
started = 0
try:
    for _ in range({settings["num_children"]}):
        if os.fork() == 0:
            time.sleep(120)
            os._exit(0)
        started += 1
except OSError:
    pass
print(started, flush=True)
time.sleep(120 * {settings["is_bomb"]})
'''
outcome = sandbox.run(["p.py"], {"p.py": program}, b"", limits, wall_s=100, output_bytes=2**20)
for other in later:
    other.kill()
    other.wait()
print(json.dumps([outcome.ended, outcome.stdout.decode(), outcome.error_tail.decode()]))
"""


@pytest.mark.parametrize(
    ("num_children", "num_later", "is_bomb", "ended"),
    [(6, 40, False, "itself"), (40, 0, True, "processes"), (40, 0, False, "processes")],
    ids=["allowed", "too many", "too many for a moment"],
)
def test_where_the_kernel_counts_all_processes_of_the_user_only_the_programs_own_count(
    server: Server, num_children: int, num_later: int, is_bomb: bool, ended: str
) -> None:
    """The kernel limits no processes of root: there only the count of the sandbox is tested."""
    request = {"num_children": num_children, "num_later": num_later, "is_bomb": is_bomb}
    output, errors = server.run(server.python, "-c", MANY, stdin=json.dumps(request).encode())
    assert not errors
    assert json.loads(output)[0] == ended, output
    assert ended != "itself" or json.loads(output)[1] == f"{num_children}\n", output


def test_where_the_kernel_counts_all_processes_of_the_user_it_stops_a_burst(server: Server) -> None:
    """Otherwise one program takes the process ids of the pod before it is counted, here when it has printed."""
    if server.user == 0:
        pytest.skip("the kernel limits no processes of root")
    request = {"num_children": 1000, "num_later": 0, "is_bomb": False, "counts_after_output": True}
    output, errors = server.run(server.python, "-c", MANY, stdin=json.dumps(request).encode())
    assert not errors
    ended, printed, _ = json.loads(output)
    assert ended == "processes" and 8 < int(printed) < 8 + 128, output


@pytest.mark.parametrize(
    ("has_seccomp", "drops_user", "has_namespaces", "slack"),
    [(True, False, False, 128), (False, False, False, 0), (True, True, False, 0), (True, False, True, 0)],
)
def test_the_kernel_allows_more_processes_only_where_the_sandbox_counts_them(
    has_seccomp: bool, drops_user: bool, has_namespaces: bool, slack: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without seccomp a process can leave the session, and would be neither counted nor ended."""
    monkeypatch.setattr(builtin, "_num_threads_of", lambda _: 50)
    layers = builtin.Layers(1, has_seccomp, has_namespaces, drops_user)
    limits = Limits(cpu_s=20, memory_bytes=2**30, file_bytes=2**20, folder_bytes=2**22, max_processes=8)
    allowed = dict(builtin.Restrictions(layers, limits, tmp_path, [])._limits)[resource.RLIMIT_NPROC]
    assert allowed[0] == 8 + slack + (0 if drops_user or has_namespaces else 50)
    assert layers.counts_processes == (slack > 0)


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) >= MIN_ATTACKS and len(FILES) >= 20 and len(PROCESSES) >= 20
