"""`penstock up` and `penstock demo` with wrong input print one line, return an exit code and leave nothing running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil

from penstock_tools.local.processes import ProcessGroup

ROOT = Path(__file__).parents[3]


def penstock(*words: str) -> tuple[int, str]:
    """Run the command, check that no child outlives it, and return its exit code and error output."""
    mark = {"PENSTOCK_TEST_COMMAND": uuid.uuid4().hex}
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        cwd=ROOT,
        env={**os.environ, **mark},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    left = [p for p in psutil.process_iter(["environ"]) if mark.items() <= (p.info["environ"] or {}).items()]
    assert left == []
    return result.returncode, result.stderr


def test_a_missing_config_file(tmp_path: Path) -> None:
    code, error = penstock("up", str(tmp_path / "nowhere.yaml"))
    assert code == 2
    assert error.splitlines() == [
        f"penstock: error: config file {tmp_path}/nowhere.yaml does not exist; write one with "
        f"`penstock init {tmp_path}/nowhere.yaml`"
    ]


def test_a_missing_model_folder(tmp_path: Path) -> None:
    code, error = penstock("demo", "--run_dir", str(tmp_path), "--model.path", "/nowhere")
    assert code == 2
    assert error.splitlines() == [
        "penstock: error: model.path /nowhere is not a model folder; give one with config.json in it"
    ]


def test_an_error_of_an_earlier_start_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "part.log").write_text("penstock part: error: of a start before\n")
    group = ProcessGroup(tmp_path)
    silent = group.start("part", [sys.executable, "-c", "raise SystemExit(3)"])
    silent.process.wait(30)
    assert str(silent.error()) == f"part exited with code 3 (log: {tmp_path / 'part.log'})"
    loud = group.start("part", [sys.executable, "-c", "raise SystemExit('penstock part: error: of this one')"])
    loud.process.wait(30)
    assert "exited with code 1: of this one (log" in str(loud.error())
    group.stop()


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, error = penstock("demo", "--run_dir", str(tmp_path), "--gateway.port", str(port))
    assert code == 2
    assert f"port {port} on 127.0.0.1 is in use; set gateway.port to a free one" in error
    assert len(error.splitlines()) == 1


def test_a_mistyped_override(tmp_path: Path) -> None:
    code, error = penstock("demo", "--run_dir", str(tmp_path), "--learner.Lr", "1")
    assert code == 2
    assert "unknown key 'learner.Lr'; did you mean 'lr'?" in error


def test_a_missing_dataset(tmp_path: Path) -> None:
    code, error = penstock("demo", "--run_dir", str(tmp_path), "--demo.train_file", "nowhere.parquet")
    assert code == 2
    assert "nowhere.parquet" in error
    assert len(error.splitlines()) == 1


COMMANDS = ("demo", "up", "submit", "status", "policies", "gateway", "rollout", "learner")


def test_every_command_has_help_without_heavy_imports() -> None:
    script = (
        "import sys; from penstock.cli.main import main\n"
        f"for command in {COMMANDS}:\n"
        "    try: main([command, '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {'torch', 'vllm', 'ray', 'transformers', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, (command, heavy)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("usage: penstock") == len(COMMANDS)
