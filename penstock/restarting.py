"""Which processes `penstock up` is starting again, for commands that find no gateway.

`restarting.json` in the run's folder has the name of each, and how it ended. It counts only while the supervisor lives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = "restarting.json"


def write_restarting(folder: Path, ended: Mapping[str, str]) -> None:
    """Write the processes that are not up again, each with how it ended; without one, remove the file."""
    file = folder / FILE
    if not ended:
        file.unlink(missing_ok=True)
        return
    written = file.with_suffix(".partial")
    written.write_text(json.dumps(dict(ended)))
    written.replace(file)


def read_restarting(folder: Path) -> dict[str, str]:
    """The processes that are being started again, each with how it ended; empty if nobody has written it."""
    try:
        found = json.loads((folder / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return {str(name): str(text) for name, text in found.items()} if isinstance(found, dict) else {}


def why_no_gateway(folder: Path) -> str:
    """What keeps the gateway of a run from answering, whose supervisor lives."""
    ended = read_restarting(folder)
    if not ended:
        return f"the run in {folder} is starting or stopping, and its gateway is not up; try again soon"
    what = "; ".join(ended[name] for name in sorted(ended, key=lambda name: name != "gateway"))
    return f"`penstock up` is starting {', '.join(sorted(ended))} of the run in {folder} again ({what}); try again soon"
