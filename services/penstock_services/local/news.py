"""Says what is new about a run on this machine, as it happens."""

from __future__ import annotations

import asyncio

from penstock.api.records import Run
from penstock.diagnosis.display import Progress
from penstock.diagnosis.log_lines import Announcements, waiting_for
from penstock.errors import Unavailable
from penstock_services.local.local_run import LocalRun

ANSWER_S = 0.5
"""How long the gateway may take to answer. `LocalRun.check` tells why it does not."""


class News:
    """Reads the run's status and says what is new in it. Open it before the workers are started."""

    def __init__(self, run: LocalRun, display: Progress, status: Run) -> None:
        self.run = run
        self.display = display
        self.before = self.status = status
        """The newest status that the gateway has answered with."""
        self.is_new = True
        """Whether the newest question was answered."""
        self._announcements = Announcements(status, f"penstock runs resume --run-dir {run.folder}")

    @classmethod
    async def open(cls, run: LocalRun, display: Progress) -> News:
        run.processes.on_wait = run.on_restart = display.say
        return cls(run, display, await run.client.get_run())

    async def say(self) -> Run:
        """Say what is new, and return the status."""
        self.is_new = False
        try:
            async with asyncio.timeout(ANSWER_S):
                self.status = await self.run.client.get_run()
        except (TimeoutError, Unavailable):
            return self.status
        self.is_new = True
        for line in self._announcements.new_lines(self.status):
            self.display.say(line)
        return self.status

    def say_stopping(self, after: str = "") -> None:
        """Say that the run is stopped, and its step, or what it was waiting for if it was still starting."""
        waited = waiting_for(self.status, self.before)
        at = f"it was still starting ({waited})" if waited else f"it was at step {self.status.step}"
        if self.status.state == "PAUSED":
            at = f"it was paused at step {self.status.step}"
        self.display.say(f"stopping the run; {at}{after}")
