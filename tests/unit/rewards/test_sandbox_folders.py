"""Folders of programs are removed whatever is in them, also those of a process that was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_rollout.rewards.sandbox.builtin import BaseFolder, remove_leftovers, remove_tree
from penstock_rollout.rewards.sandbox.program import MAX_FILES, ControlGroup, files_are_exceeded
from support.processes import is_running
from support.sandbox_attacks import ORDINARY_USER, Server, ordinary_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")
NUM_NESTED = 2500
REMOVE = """
import json, os, sys
from pathlib import Path
from penstock_rollout.rewards.sandbox.builtin import remove_tree
top = Path(sys.argv[1]) / "tree"
(top / "a/b").mkdir(parents=True)
(top / "a/b/file").write_text("x")
for path, mode in ((top / "a/b", 0), (top / "a", 0o300), (top, 0o100)):
    path.chmod(mode)
print(json.dumps([remove_tree(top), top.exists()]))
"""


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder that tempfile uses, in memory where possible: thousands of folders are slow on a disk."""
    shared_memory = Path("/dev/shm")
    parent = shared_memory if os.access(shared_memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_deep_tree_is_removed(temporary: Path) -> None:
    top = temporary / "top"
    top.mkdir()
    folder = os.open(top, os.O_RDONLY)
    for _ in range(NUM_NESTED):
        os.mkdir("d", dir_fd=folder)
        inner = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    assert files_are_exceeded(top, 2**30)
    assert remove_tree(top) and not top.exists()


def test_links_are_not_followed(temporary: Path) -> None:
    outside = temporary / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    top = temporary / "top"
    (top / "inner").mkdir(parents=True)
    (top / "link").symlink_to(outside)
    (top / "inner" / "line\nbreak").symlink_to("/")
    assert remove_tree(top) and not top.exists()
    assert (outside / "file").read_text() == "kept"


def test_an_ordinary_user_removes_closed_folders(tmp_path: Path) -> None:
    is_root = os.geteuid() == 0
    python = ordinary_python() if is_root else sys.executable
    if not python:
        pytest.skip("an ordinary user can run no interpreter of this machine")
    server = Server(ORDINARY_USER if is_root else os.geteuid(), python)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        output, errors = server.run(python, "-c", REMOVE, folder, stdin=b"")
    if "ModuleNotFoundError" in errors or "PermissionError: [Errno 13] Permission denied: '/root" in errors:
        pytest.skip(f"an ordinary user cannot use this checkout: {errors.splitlines()[-1]}")
    assert json.loads(output) == [True, False], errors


def test_what_cannot_be_removed_is_logged_and_not_raised(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (temporary / "top").mkdir()
    (temporary / "top" / "file").touch()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("refused")

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", refuse)
        patched.setattr(subprocess, "run", lambda *_, **__: None)
        assert not remove_tree(temporary / "top")
    assert "remove it by hand" in caplog.text
    assert remove_tree(temporary / "absent")


def test_leftovers_of_a_killed_process_are_removed_with_its_programs(temporary: Path) -> None:
    code = """
import os, signal, subprocess, tempfile, time
from penstock_rollout.rewards.sandbox.builtin import BaseFolder
base = BaseFolder.create()
with base.private_folder() as folder:
    (folder / "file").write_text("x")
    program = subprocess.Popen(["/bin/sleep", "999"], env={"HOME": str(folder)}, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while b"HOME=" not in open(f"/proc/{program.pid}/environ", "rb").read():
        time.sleep(0.01)  # the kernel shows the environment of a program some moments after it was started
    print(base.path, program.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    path, pid = done.stdout.split()
    in_use = BaseFolder.create()
    try:
        assert Path(path).exists()
        remove_leftovers()
        assert not Path(path).exists() and in_use.path.exists()
    finally:
        in_use.close()
        ended = _ends(int(pid))
        if not ended:
            os.kill(int(pid), signal.SIGKILL)
    assert ended
    assert not in_use.path.exists()


def _ends(pid: int) -> bool:
    """Wait until a process that is not ours has ended, for a minute at most."""
    for _ in range(1200):
        if not is_running(pid):
            return True
        time.sleep(0.05)
    return False


def test_many_files_and_hidden_ones_exceed_the_limit(temporary: Path) -> None:
    (temporary / "a").write_bytes(bytes(10_000))
    assert not files_are_exceeded(temporary, 2**20)
    assert files_are_exceeded(temporary, 5_000)
    for number in range(MAX_FILES):
        (temporary / f"f{number}").touch()
    assert files_are_exceeded(temporary, 2**30)


@pytest.mark.parametrize(
    ("memberships", "files"),
    [
        ("0::/pod/server\n", {"": ["cgroup.controllers"], "pod": [], "pod/server": []}),
        ("4:memory:/pod\n8:pids:/\n0::/\n", {"memory/pod": [], "pids": []}),
    ],
    ids=["version 2", "version 1"],
)
def test_a_control_group_is_made_where_this_process_is(
    temporary: Path, memberships: str, files: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a group appear with its folder, as the kernel makes them."""
    for folder, names in files.items():
        (temporary / folder).mkdir(parents=True, exist_ok=True)
        for name in names:
            (temporary / folder / name).touch()
    make = Path.mkdir

    def mkdir(self: Path, *arguments: int, **options: bool) -> None:
        make(self, *arguments, **options)
        for name in ("memory.max", "pids.max", "cgroup.procs") if "::/pod" in memberships else _files_of(self):
            (self / name).touch()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    group = ControlGroup.create(temporary, memberships)
    assert group is not None
    group.limit(2**30, 16)
    group.add(77)
    written = {path.name: path.read_text() for folder in group.folders for path in folder.iterdir()}
    memory = "memory.max" if "::/pod" in memberships else "memory.limit_in_bytes"
    assert written[memory] == str(2**30) and written["pids.max"] == "16" and written["cgroup.procs"] == "77"


def _files_of(folder: Path) -> list[str]:
    return ["memory.limit_in_bytes" if "memory" in folder.parts else "pids.max", "cgroup.procs"]


def test_without_control_groups_there_is_none(temporary: Path) -> None:
    assert ControlGroup.create(temporary, "0::/\n") is None
    assert ControlGroup.create(temporary, "4:memory:/gone\n8:pids:/gone\n") is None
