"""The reward process exits without a traceback, whenever the signal to end arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TERMINATED_AT_ITS_END = """
import atexit, os, signal
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
compute_score = lambda **_: 1.0
"""


@pytest.mark.parametrize("way", ["requests end", "terminated"])
def test_a_signal_while_python_shuts_down_prints_nothing(tmp_path: Path, way: str) -> None:
    (tmp_path / "reward.py").write_text(TERMINATED_AT_ITS_END)
    settings = {
        "kind": "function",
        "file": str(tmp_path / "reward.py"),
        "name": "compute_score",
        "kwargs": {},
        "batch": False,
    }
    text = json.dumps({"settings": json.dumps(settings), "calls": [], "read": "score"}).encode()
    with subprocess.Popen(
        [sys.executable, "-m", "penstock_rollout.rewards.pool"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as worker:  # fmt: skip
        assert worker.stdin and worker.stdout and worker.stderr
        worker.stdin.write(text + b"\n")
        worker.stdin.flush()
        assert json.loads(worker.stdout.readline())["answers"] == []
        if way == "terminated":
            worker.terminate()
        worker.stdin.close()
        assert worker.stderr.read() == b""
