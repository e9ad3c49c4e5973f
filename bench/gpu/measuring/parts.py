"""Runs a GPU benchmark in parts. Each part is a process with a deadline, and its figures are saved as soon as it ends.

If a part fails, only its own figures are lost. Results of parts that are not run stay in the file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness import RESULTS, Bar, Measurement, report
from measuring.results import Results

STARTED_AT = "PENSTOCK_BENCH_STARTED"
WRITE_TO = "PENSTOCK_BENCH_WRITE"


def run_parts(
    name: str, title: str, parts: Sequence[str], timeouts_s: Mapping[str, float], run: Callable[[str], Results]
) -> bool:
    """Start this program again for each part, which calls `run` there. Returns whether every bar is met."""
    os.environ.setdefault(STARTED_AT, str(time.time()))
    if WRITE_TO in os.environ:
        part, _, _ = os.environ[WRITE_TO].partition("=")
        save(run(part))
        return True
    merged = earlier_results(name, parts)
    met = True
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for part in parts:
            results = _start(part, Path(folder) / f"{part}.json", timeouts_s[part])
            merged.measurements += [replace(m, name=f"{part}: {m.name}") for m in results.measurements]
            merged.bars += [replace(b, name=f"{part}: {b.name}") for b in results.bars]
            met = report(name, title, merged.measurements, merged.bars)
    return met


def save(results: Results) -> None:
    """Save the results so far. A part calls this repeatedly, so that a missed deadline loses only later figures."""
    _, _, path = os.environ[WRITE_TO].partition("=")
    Path(path).write_text(json.dumps(asdict(results)))


def _start(part: str, written: Path, timeout_s: float) -> Results:
    """Run a part. Returns the results that it saved, and a bar for whether it ended well. Ends all its processes."""
    environment = os.environ | {WRITE_TO: f"{part}={written}"}
    process = subprocess.Popen([sys.executable, *sys.argv], start_new_session=True, env=environment)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"part {part} took longer than {timeout_s:.0f} s", flush=True)
    finally:
        _end_session(process)
    ended_well = Bar("part ended well", float(process.returncode == 0), 1)
    said = json.loads(written.read_text()) if written.exists() else {"measurements": [], "bars": []}
    return Results([Measurement(**m) for m in said["measurements"]], [ended_well, *(Bar(**b) for b in said["bars"])])


def earlier_results(name: str, parts: Sequence[str]) -> Results:
    """The results of all other parts in the file."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return Results()
    said = json.loads(path.read_text())

    def is_other(entry: str) -> bool:
        return entry.partition(": ")[0] not in parts

    measurements = [Measurement(m["name"], m["unit"], m["rates"]) for m in said["measurements"] if is_other(m["name"])]
    bars = [Bar(b["name"], b["value"], b["goal"], b["at_most"]) for b in said["bars"] if is_other(b["name"])]
    return Results(measurements, bars)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of the part, which contains everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
