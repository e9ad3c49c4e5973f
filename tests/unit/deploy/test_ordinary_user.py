"""The script that runs tests as an ordinary user runs them or fails. It never passes without having run them."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / ".ci" / "as-ordinary-user"


def test_it_fails_where_the_checkout_is_closed_and_there_are_no_mount_namespaces(tmp_path: Path) -> None:
    for program, code in {"chown": 0, "setpriv": 1, "unshare": 1}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\nexit {code}\n")
        (tmp_path / program).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([SCRIPT, "python3", "true"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "is closed to others, and there are no mount namespaces; move both to folders" in line
