"""Tests that are known to be flaky. They run, their outcome is printed, and their failures do not fail the run.

A failed test is never run again until it passes. Mend one that depends on load or luck; until then list it here.
"""

from __future__ import annotations

import pytest

QUARANTINED: dict[str, str] = {}
"""Reason by test: `{"tests/unit/test_x.py::test_y": "a deadline of 2 s passes on a busy machine"}`."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := QUARANTINED.get(item.nodeid.partition("[")[0]):
            item.add_marker(pytest.mark.xfail(reason=f"quarantined: {reason}", strict=False))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not QUARANTINED:
        return
    terminalreporter.section("quarantined tests: mend them, and take them off tests/support/quarantine.py")
    for test, reason in QUARANTINED.items():
        terminalreporter.line(f"{test}: {reason}")
