"""The committed stubs are what protoc makes of the current contracts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    protos = sorted(str(path) for path in (ROOT / "proto/penstock/v1").glob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, *protos]
    subprocess.run(command, check=True, timeout=120)
    made = {path.name: path.read_text() for path in (tmp_path / "penstock/v1").iterdir()}
    committed = {
        path.name: path.read_text() for path in (ROOT / "penstock/v1").glob("*_pb2*") if path.suffix in (".py", ".pyi")
    }
    assert made == committed, "run `make proto` and commit the result"
