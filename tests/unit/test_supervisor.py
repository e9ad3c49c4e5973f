"""Tests what `penstock up` says when a process whose death ends the run has died."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.errors import ProcessDied
from penstock_tools.local.supervisor import check_processes


class DeadLearner:
    async def check(self) -> None:
        raise ProcessDied("learner was killed by signal 9 (log: runs/demo/logs/learner.log)")


class Display:
    def __init__(self) -> None:
        self.printed: list[str] = []

    def print(self, line: str) -> None:
        self.printed.append(line)


async def test_the_process_whose_death_ends_the_run_is_named_at_once() -> None:
    display = Display()
    with pytest.raises(ProcessDied, match=r"signal 9 .* fix the cause and start the run again"):
        await check_processes(cast(Any, DeadLearner()), cast(Any, display))
    assert display.printed == ["learner has died; stopping the others, which may take a minute"]
