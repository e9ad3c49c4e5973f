"""Named places at which fault tests kill the learner or one of its ranks: PENSTOCK_CRASH_AT=name[:count],...

| name | process |
|---|---|
| one of NAMES | the controller |
| before_rewind, after_rewind | the controller, while it rewinds to a checkpoint |
| mid_upload, after_upload | the controller, while it uploads a checkpoint: before its manifest, and after it |
| ROLE.RANK, for example critic.1 | a rank: in each update of a trained role, in each forward pass of a frozen one |
"""

from __future__ import annotations

import os
import signal
from collections import Counter

ENVIRONMENT = "PENSTOCK_CRASH_AT"
NAMES = ("after_read", "mid_step", "before_flush", "after_flush", "after_commit")
"""The places in the controller process, in the order in which a group passes them."""
_passed: Counter[str] = Counter()


def crash_point(name: str) -> None:
    """Die as by `kill -9` if the environment names this place, the count-th time it is passed (default: the first)."""
    wanted = os.environ.get(ENVIRONMENT)
    if not wanted:
        return
    _passed[name] += 1
    for place, _, count in (entry.partition(":") for entry in wanted.split(",")):
        if place == name and _passed[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)
