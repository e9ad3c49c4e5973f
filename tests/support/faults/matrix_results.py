"""Collects the rows of the fault matrix from tests that are marked `fault_row`, and writes them to a file.

    @pytest.mark.fault_row("rollout servers", "kill -9 in mid-generation", how="SIGKILL", must="the lease is re-issued")

The name of the fault may contain parameters of the test, such as "corrupted push by {transport}".

`--fault-results FILE` writes the rows of this session into FILE. Rows of other tests that FILE has already stay. A test
adds what it measured by `record_property("fault", {...})`, with any of the keys of `MEASURED`. A test that makes
several faults records each by `record_property("fault", {"fault": …, …})`, and gets a row for each.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
MEASURED = ("lost", "doubled", "recovery_s")
ROW = "fault_row"
RECORDED = "fault"
_outcomes: dict[str, tuple[str, float]] = {}
_rows: dict[str, list[dict[str, Any]]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-results", type=Path, default=None, help="write the rows of the fault matrix to this file")


def pytest_itemcollected(item: pytest.Item) -> None:
    marker = item.get_closest_marker(ROW)
    if marker is not None:
        area, fault = marker.args
        fault = fault.format(**item.callspec.params) if hasattr(item, "callspec") else fault
        described = {"area": area, "fault": fault, "how": marker.kwargs["how"], "must": marker.kwargs["must"]}
        is_slow = any(item.get_closest_marker(name) for name in ("chaos", "long"))
        described["command"] = "make chaos" if is_slow else "make test"
        item.user_properties.append((ROW, described))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    properties = [value for name, value in report.user_properties if name == ROW]
    if not properties:
        return
    outcome, seconds = _outcomes.get(report.nodeid, ("passed", 0.0))
    if report.outcome != "passed":
        outcome = report.outcome
    _outcomes[report.nodeid] = (outcome, seconds + report.duration)
    if report.when == "teardown":
        measured = [value for name, value in report.user_properties if name == RECORDED] or [{}]
        _rows[report.nodeid] = [_row(properties[0], report.nodeid, each) for each in measured]


def _row(described: dict[str, str], test: str, measured: dict[str, Any]) -> dict[str, Any]:
    outcome, seconds = _outcomes[test]
    own = {name: measured[name] for name in described if name in measured}
    numbers = {name: measured.get(name) for name in MEASURED}
    if numbers["recovery_s"] is not None:
        numbers["recovery_s"] = round(numbers["recovery_s"], 1)
    return {
        **described, **own, "test": test.removeprefix("tests/"), "outcome": outcome, **numbers,
        "seconds": round(seconds, 1), "machine": machine(),
    }  # fmt: skip


def commit() -> str:
    """The commit that is tested, with `+changes` if the code has any. The files that this makes do not count."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    name = git("rev-parse", "--short=12", "HEAD").stdout.strip()
    made = [f":!{path}" for path in ("tests/faults/results.json", "docs/faults.md")]
    return name + ("+changes" if name and git("diff", "--quiet", "HEAD", "--", ".", *made).returncode else "")


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--fault-results")
    if path is None or hasattr(session.config, "workerinput") or not _rows:
        return
    kept = json.loads(path.read_text()) if path.exists() else []
    tested = commit()
    new = [row | {"commit": tested} for rows in _rows.values() for row in rows]
    ran = {row["test"] for row in new}
    rows = [row for row in kept if row["test"] not in ran] + new
    rows.sort(key=lambda row: (row["area"], row["test"], row["fault"]))
    path.write_text(json.dumps(rows, indent=1) + "\n")
