"""The limit on open files is raised to what the system permits, and never lowered."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from penstock.machine import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "expected"), [(256, 900, "900 900"), (900, 900, "900 900")])
def test_the_limit_is_raised_to_the_hard_one(soft: int, hard: int, expected: str) -> None:
    script = SCRIPT.format(soft=soft, hard=hard)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip() == expected
