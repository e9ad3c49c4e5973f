"""Phases of the start of a process: `starting Ray`, `loading the model` and so on, until it serves or trains.

Each process records its phases itself. `penstock up` prints a line for each, and the API shows them. Times are those of
Redis' clock.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

import redis.asyncio as redis

from penstock.errors import PenstockError
from penstock.store.keys import RunKeys
from penstock.store.redis_errors import guarded
from penstock.store.scripts import STORE

logger = logging.getLogger(__name__)
MAX_PHASES = 16
"""The newest phases of a part that are kept."""


@dataclass(frozen=True)
class Phase:
    name: str
    entered_at_ms: int


class Phases:
    """The phases of all parts of one run."""

    def __init__(self, client: redis.Redis, run: str) -> None:
        self.client: Any = client
        self.keys = RunKeys(run)
        self.newest = ""
        """The phase that this process has entered last."""

    async def enter(self, component: str, phase: str, *, is_first: bool = False) -> None:
        """Record that `component` has begun `phase`. The first phase of a process removes those of the process before
        it. If Redis does not answer or refuses the phase, it is only logged: a start does not fail because of this."""
        phase = phase.encode("utf-8", "replace").decode()  # it may name a path, which need not be UTF-8
        self.newest = phase
        logger.info("%s", phase)
        arguments = (component, phase, int(is_first), MAX_PHASES)
        try:
            await STORE.call(self.client, self.keys.prefix, "enter_phase", *arguments)
        except PenstockError as error:
            logger.warning("cannot record the phase: %s", error)

    async def age_s(self, phase: Phase) -> float:
        """Seconds since the phase began."""
        seconds, microseconds = await guarded(self.client.time())
        return int(seconds) + int(microseconds) / 1e6 - phase.entered_at_ms / 1000

    async def by_component(self) -> dict[str, list[Phase]]:
        """The newest phases of each part, oldest first."""
        records = await guarded(self.client.hgetall(self.keys.phases))
        return {
            component.decode(): [Phase(name, int(at_ms)) for name, at_ms in json.loads(text)]
            for component, text in sorted(records.items())
        }
