"""Runs the workers of examples/, which need packages that do not go together with ours, in a Python of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateways import Gateway

ROOT = Path(__file__).parents[1]
DEADLINE_S = 150


async def run_worker(package: str, script: str, *arguments: str, gateway: Gateway, log: Path) -> str:
    """Run a worker of examples/ until there are no tasks. Returns what it printed.

    PENSTOCK_<PACKAGE>_PYTHON names a Python that has the package; without it the test is skipped."""
    variable = f"PENSTOCK_{package.upper()}_PYTHON"
    python = os.environ.get(variable, sys.executable)
    found = await asyncio.to_thread(
        subprocess.run, [python, "-c", f"import {package}"], capture_output=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"needs {package}; set {variable} to a Python that has it")
    with log.open("w") as output:
        worker = await asyncio.create_subprocess_exec(
            python, f"examples/{script}", *arguments, "--url", gateway.url, "--idle-s", "1", cwd=ROOT,
            env=os.environ | {"PENSTOCK_API_KEY": gateway.key, "PYTHONPATH": str(ROOT)},
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    waiting = asyncio.create_task(worker.wait())
    try:
        await asyncio.wait({waiting}, timeout=DEADLINE_S)
    finally:
        if worker.returncode is None:
            worker.kill()
        await waiting
    return log.read_text()
