"""The sandbox stops hostile programs and leaves no process or file of them behind."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock_rollout.rewards.sandbox import program as running
from penstock_rollout.rewards.sandbox.builtin import PREFIX
from penstock_rollout.rewards.sandbox.program import ERROR_TAIL_BYTES, Limits, Outcome, RunningProgram
from penstock_rollout.rewards.sandbox.run import Choice, Sandbox
from support.confinements import WORKING
from support.processes import until

Run = Callable[..., Outcome]
LIMITS = Limits(cpu_s=10, memory_bytes=2**29, file_bytes=2**16, folder_bytes=2**22, max_processes=8)
pytestmark = pytest.mark.parametrize("confinement", WORKING)


@pytest.fixture
def run(confinement: Choice) -> Run:
    def run(
        program: str, *, stdin: bytes = b"", wall_s: float = 60.0, output_bytes: int = 2**16, limits: Limits = LIMITS
    ) -> Outcome:
        sandbox = Sandbox.open(confinement)
        return sandbox.run(
            ["program.py"], {"program.py": program}, stdin, limits, wall_s=wall_s, output_bytes=output_bytes
        )

    return run


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(_children())
    yield
    assert set(_children()) <= before


@pytest.fixture
def ends_after_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of a program passes half a second after it has printed, however late a busy machine starts it."""
    transfer, printed_at = RunningProgram._transfer, list[float]()

    def note_output(self: RunningProgram, *words: Any) -> None:
        transfer(self, *words)
        if self._written and not printed_at:
            printed_at.append(time.monotonic())

    def clock() -> float:
        now = time.monotonic()
        return now + 3600 if printed_at and now > printed_at[0] + 0.5 else now

    monkeypatch.setattr(RunningProgram, "_transfer", note_output)
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))


OWN_SLEEP = f"998.{os.getpid()}"
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


def test_an_honest_program_reads_and_prints(run: Run) -> None:
    outcome = run("print(int(input()) * 2)\nopen('note', 'w').write('x')", stdin=b"21\n")
    assert (outcome.stdout, outcome.succeeded) == (b"42\n", True)


def test_threads_subprocesses_and_event_loops_work(run: Run) -> None:
    program = """
import asyncio, subprocess, threading
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.run(["/bin/echo", "child"], capture_output=True, text=True).stdout.strip())
asyncio.run(asyncio.sleep(0))
"""
    outcome = run(program)
    assert outcome.stdout.split() == [b"thread", b"child"], outcome.error_tail


def test_ordinary_programs_that_fail_have_an_alternative_that_works(run: Run) -> None:
    """docs/rewards.md lists them."""
    program = """
import multiprocessing, socket
from concurrent.futures import ProcessPoolExecutor
fork = multiprocessing.get_context("fork")
failing = [
    lambda: fork.Pool(1), fork.Queue, fork.Lock,
    lambda: ProcessPoolExecutor(1, mp_context=fork).submit(int).result(),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
    lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
    lambda: open("/dev/zero"), lambda: open("/dev/full"), lambda: open("/dev/shm/x", "w"),
]
for call in failing:
    try:
        call()
        print("works")
    except OSError:
        print("fails")
ours, theirs = fork.Pipe()
child = fork.Process(target=theirs.send, args=("piped",))
child.start()
print(ours.recv())
child.join()
socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
"""
    outcome = run(program)
    assert outcome.stdout.split() == 9 * [b"fails"] + [b"piped"] and outcome.succeeded, outcome.error_tail


def test_the_usual_devices_can_be_used(run: Run) -> None:
    program = """
import os, subprocess
subprocess.run(["/bin/echo", "nothing"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
print(len(open("/dev/urandom", "rb").read(4)), open(os.devnull, "w").write("x"))
"""
    outcome = run(program)
    assert outcome.stdout == b"4 1\n", outcome.error_tail


@pytest.mark.usefixtures("ends_after_output")
def test_an_endless_loop_is_ended_at_its_deadline(run: Run) -> None:
    outcome = run("print('began', flush=True)\nwhile True: pass")
    assert outcome.ended == "deadline" and not outcome.succeeded
    assert outcome.stdout == b"began\n"


def test_a_program_that_ignores_signals_is_ended(run: Run) -> None:
    program = """
import signal, time
for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(99)
"""
    assert run(program, wall_s=0.5).ended == "deadline"


@pytest.mark.usefixtures("ends_after_output")
def test_a_fork_bomb_stays_small_and_is_ended_whole(run: Run) -> None:
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
    outcome = run(program)
    assert outcome.ended == "deadline"
    assert 1 <= int(outcome.stdout.split()[0]) < LIMITS.max_processes


def test_children_that_outlive_the_program_are_ended(run: Run) -> None:
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


def test_memory_is_bounded(run: Run) -> None:
    outcome = run("x = bytearray(2**30)")
    assert outcome.exit_code == 1 and b"MemoryError" in outcome.error_tail


def test_file_size_is_bounded(run: Run) -> None:
    outcome = run("open('big', 'wb').write(bytes(2**20))")
    assert not outcome.succeeded and b"File too large" in outcome.error_tail


def test_an_output_flood_is_cut(run: Run) -> None:
    outcome = run("while True: print('x' * 4096)")
    assert outcome.ended == "output"
    assert len(outcome.stdout) < 2**20
    flood_of_errors = run("import sys\nfor _ in range(2000): sys.stderr.write('x' * 4096)\nprint('end')")
    assert flood_of_errors.stdout == b"end\n" and len(flood_of_errors.error_tail) <= ERROR_TAIL_BYTES


def test_the_environment_is_clean(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    outcome = run("import os; print(sorted(os.environ))")
    assert b"API_KEY" not in outcome.stdout and b"PATH" in outcome.stdout


def test_a_program_of_root_is_another_user(run: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root changes the user")
    assert run("import os; print(os.getuid() >= 60000, os.getgroups())").stdout == b"True []\n"


def test_a_program_gets_no_descriptor_of_the_server(run: Run) -> None:
    program = """
import os
for number in range(3, 256):
    try: os.fstat(number)
    except OSError: continue
    print(number)
"""
    assert run(program).stdout == b""


def test_temporary_files_archives_and_copies_work(run: Run) -> None:
    program = """
import os, shutil, sqlite3, tempfile, zipfile
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "a")
    open(path, "w").write("text")
    shutil.copyfile(path, path + "b")
    with zipfile.ZipFile(path + ".zip", "w") as archive: archive.write(path, "a")
    zipfile.ZipFile(path + ".zip").extractall(os.path.join(folder, "out"))
    shutil.move(path, path + "c")
    sqlite3.connect(os.path.join(folder, "d")).execute("create table t (x)")
    print(sorted(os.listdir(folder)))
"""
    outcome = run(program)
    assert outcome.stdout == b"['a.zip', 'ab', 'ac', 'd', 'out']\n", outcome.error_tail


def test_the_memory_of_all_processes_together_is_bounded(
    run: Run, confinement: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process stays below its own limit. Without a control group the sandbox measures."""
    program = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        block = bytearray(os.urandom(1 << 20)) * 200
        time.sleep(99)
time.sleep(99)
print("survived")
"""
    sandbox = Sandbox.open(confinement)
    monkeypatch.setattr(sandbox, "group", None)
    assert run(program).ended == "memory"


def test_a_control_group_bounds_the_memory(run: Run, confinement: Choice) -> None:
    if Sandbox.open(confinement).group is None:
        pytest.skip("this machine lets us make no control group")
    program = """
import os
waiting, release = os.pipe()
children, reports = [], []
for _ in range(5):
    report, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release)
        block = bytearray(os.urandom(1 << 20)) * 200
        os.write(done, b"x")
        os.read(waiting, 1)
        os._exit(0)
    os.close(done)
    children.append(pid)
    reports.append(report)
for report in reports:
    os.read(report, 1)  # this child holds its block, or was killed
os.close(release)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""
    outcome = run(program)
    assert outcome.ended == "itself" and (not outcome.succeeded or b"-9" in outcome.stdout), outcome


def test_the_size_of_all_files_together_is_bounded(run: Run) -> None:
    program = """
import time
for number in range(1000):
    with open(str(number), "wb") as file: file.write(bytes(2**16))
time.sleep(99)
"""
    outcome = run(program)
    assert outcome.ended == "files" or b"No space left" in outcome.error_tail, outcome


@pytest.mark.parametrize("keep", ["kept.append(file)", "kept.append(mapped(file)); os.close(file)"])
def test_files_that_were_removed_count_while_they_are_used(run: Run, keep: str) -> None:
    program = f"""
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
mapped = lambda file: libc.mmap(None, ctypes.c_size_t(4096), 1, 1, file, ctypes.c_long(0))
kept = []
for number in range(200):
    file = os.open("file", os.O_CREAT | os.O_RDWR)
    os.unlink("file")
    os.write(file, bytes(2**16))
    {keep}
time.sleep(99)
"""
    outcome = run(program)
    assert outcome.ended == "files" or b"No space left" in outcome.error_tail, outcome


def test_a_removed_file_within_the_limits_may_be_used(run: Run) -> None:
    program = """
import mmap, tempfile, time
with tempfile.TemporaryFile() as file:
    file.write(bytes(4096)); file.flush()
    block = mmap.mmap(file.fileno(), 4096)
time.sleep(0.6)
print("done")
"""
    assert run(program).stdout == b"done\n"


@pytest.mark.parametrize(
    "leftovers",
    [
        pytest.param("for _ in range(2500):\n    os.mkdir('d'); os.chdir('d')\nopen('f', 'w')", marks=pytest.mark.long),
        "os.makedirs('a/b/c'); open('a/b/f', 'w'); os.mkdir('closed', 0); os.mkdir('a/closed', 0o300)",
        "for name in ('line\\nbreak', '-rf', ' ', b'\\xff\\xfe'): os.mkdir(name)",
        "os.symlink('/', 'root'); os.symlink('no', 'broken'); os.mkfifo('p'); open('f', 'w'); os.link('f', 'g')",
    ],
    ids=["2,500 nested folders", "closed folders", "strange names", "links and pipes"],
)
def test_nothing_that_a_program_leaves_stays(run: Run, leftovers: str) -> None:
    before = _private_folders()
    outcome = run(f"import os\n{leftovers}\nprint('left')")
    # A slow machine may notice the depth while the program still nests.
    assert outcome.stdout == b"left\n" or outcome.ended == "files", outcome
    new = _private_folders() - before
    until(lambda: not any(path.exists() for path in new), "folders of programs that other tests run to go too")


def _private_folders() -> set[Path]:
    """The folders of programs, in the base folders of this user's reward processes. Another user's cannot be listed."""
    bases = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    with contextlib.suppress(FileNotFoundError):  # a base folder that another process has just removed
        return {path for base in bases if base.stat().st_uid == os.geteuid() for path in base.iterdir()}
    return _private_folders()
