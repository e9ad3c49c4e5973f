"""The sandbox stops hostile programs and leaves no process or file of them behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock_rollout.rewards.sandbox.confinement import Layers, Limits
from penstock_rollout.rewards.sandbox.program_io import ERROR_TAIL_BYTES, Outcome
from penstock_rollout.rewards.sandbox.run import Sandbox, private_folder, usable_layers

LIMITS = Limits(cpu_s=10, memory_bytes=2**29, file_bytes=2**16, max_processes=8)
pytestmark = pytest.mark.skipif(
    not usable_layers().isolates, reason="this machine has no Landlock or seccomp, so there is no sandbox to test"
)


def run(program: str, *, stdin: bytes = b"", wall_s: float = 20.0, output_bytes: int = 2**16) -> Outcome:
    with private_folder() as folder:
        (folder / "program.py").write_text(program)
        sandbox = Sandbox.open(allow_unisolated=False)
        outcome = sandbox.run(["program.py"], folder, stdin, LIMITS, wall_s=wall_s, output_bytes=output_bytes)
    assert not folder.exists()
    return outcome


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(_children())
    yield
    assert set(_children()) <= before


OWN_SLEEP = "999.125"
"""No other process sleeps this long, so its command line is known by it."""


def _processes_with(word: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def _children() -> list[int]:
    return [int(word) for word in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


def test_an_honest_program_reads_and_prints() -> None:
    outcome = run("print(int(input()) * 2)\nopen('note', 'w').write('x')", stdin=b"21\n")
    assert (outcome.stdout, outcome.succeeded) == (b"42\n", True)


def test_threads_subprocesses_and_event_loops_work() -> None:
    program = """
import asyncio, subprocess, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout.strip())
asyncio.run(asyncio.sleep(0))
"""
    outcome = run(program)
    assert outcome.stdout.split() == [b"thread", b"child"], outcome.error_tail


def test_an_endless_loop_is_ended_at_its_deadline() -> None:
    outcome = run("print('began', flush=True)\nwhile True: pass", wall_s=2.0)
    assert outcome.ended == "deadline" and not outcome.succeeded
    assert outcome.stdout == b"began\n"


def test_a_program_that_ignores_signals_is_ended() -> None:
    program = """
import signal, time
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(99)
"""
    assert run(program, wall_s=0.5).ended == "deadline"


def test_a_fork_bomb_stays_small_and_is_ended_whole() -> None:
    program = """
import os, time
num = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(99)
        num += 1
except BlockingIOError:
    print(num, flush=True)
    while True:
        try: os.fork()
        except OSError: pass
"""
    outcome = run(program, wall_s=1.5)
    assert outcome.ended == "deadline"
    assert 1 <= int(outcome.stdout.split()[0]) < LIMITS.max_processes


def test_children_that_outlive_the_program_are_ended() -> None:
    """The child becomes a program of its own that would sleep for longer than the sandbox may run."""
    program = f"""
import os
if os.fork() == 0:
    os.execv("/bin/sleep", ["sleep", "{OWN_SLEEP}"])
print("done")
"""
    outcome = run(program)
    assert outcome.stdout == b"done\n"
    assert outcome.ended == "itself", "the sandbox does not wait for the child"
    assert _processes_with(OWN_SLEEP) == []


def test_memory_is_bounded() -> None:
    outcome = run("x = bytearray(2**30)")
    assert outcome.exit_code == 1 and b"MemoryError" in outcome.error_tail


def test_file_size_is_bounded() -> None:
    outcome = run("open('big', 'wb').write(bytes(2**20))")
    assert not outcome.succeeded and b"File too large" in outcome.error_tail


def test_an_output_flood_is_cut() -> None:
    outcome = run("while True: print('x' * 4096)")
    assert outcome.ended == "output"
    assert len(outcome.stdout) < 2**20
    flood_of_errors = run("import sys\nfor _ in range(2000): sys.stderr.write('x' * 4096)\nprint('end')")
    assert flood_of_errors.stdout == b"end\n" and len(flood_of_errors.error_tail) <= ERROR_TAIL_BYTES


def test_nothing_outside_can_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    for path in (tmp_path / "file", Path("/tmp/penstock-escaped"), Path(__file__)):
        outcome = run(f"open({str(path)!r}, 'a').write('x')")
        assert b"PermissionError" in outcome.error_tail, path
    assert not list(tmp_path.iterdir()) and not Path("/tmp/penstock-escaped").exists()


def test_nothing_private_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("secret")
    secret.chmod(0o644)
    for path in (secret, Path("/etc/passwd"), Path(f"/proc/{os.getpid()}/environ"), Path("/proc/self/environ")):
        assert b"PermissionError" in run(f"open({str(path)!r}).read()").error_tail, path


def test_the_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    outcome = run("import os; print(sorted(os.environ))")
    assert b"API_KEY" not in outcome.stdout and b"PATH" in outcome.stdout


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for program in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}))",
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "import socket; socket.socket(socket.AF_UNIX)",
        ):
            assert b"PermissionError" in run(program).error_tail, program


@pytest.mark.parametrize(
    "call",
    [
        "os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(0, 9)", "os.setsid()", "os.setpgid(0, 0)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "os.pidfd_open(os.getppid())",
        "__import__('resource').prlimit(os.getppid(), 0, (1, 1))",
    ],
)  # fmt: skip
def test_other_processes_are_out_of_reach(call: str) -> None:
    outcome = run(f"import os\n{call}")
    assert b"PermissionError" in outcome.error_tail, outcome


@pytest.mark.parametrize("layers", Layers.wanted().weaker()[:-1], ids=str)
def test_every_set_of_layers_refuses_the_network_and_the_disk(layers: Layers, tmp_path: Path) -> None:
    """A container may forbid some layers. The sandbox runs in a separate process here, as in a server: libraries that
    the test process has loaded start threads after a fork, and a process with threads cannot enter a user namespace."""
    tmp_path.chmod(0o777)
    program = f"""
for attempt in ("__import__('socket').socket()", "open({str(tmp_path / "x")!r}, 'w')"):
    try: eval(attempt)
    except PermissionError: print("refused")
"""
    with private_folder() as folder:
        (folder / "program.py").write_text(program)
        runner = f"""
from pathlib import Path
from penstock_rollout.rewards.sandbox.confinement import Layers, Limits
from penstock_rollout.rewards.sandbox.run import Sandbox
outcome = Sandbox({layers}).run(["program.py"], Path({str(folder)!r}), b"", {LIMITS}, wall_s=20, output_bytes=2**16)
print(outcome.stdout.decode(), outcome.error_tail.decode(), sep="", end="")
"""
        found = subprocess.run([sys.executable, "-c", runner], capture_output=True, text=True, timeout=60, check=False)
    assert found.stdout == "refused\nrefused\n", found


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities")
def test_as_root_the_program_is_another_user() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root changes the user")
    assert run("import os; print(os.getuid() >= 60000, os.getgroups())").stdout == b"True []\n"
