"""The runs that a gateway answers for: its own, and those that were created through any gateway of the same Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.config.run import RunConfig
from penstock.errors import NotFound
from penstock.store.created_runs import CreatedRuns

if TYPE_CHECKING:
    from penstock_services.gateway.handlers import Handlers


class ServedRuns:
    """Handlers by run. Those of a created run are made when it is first asked for: its config never changes."""

    def __init__(self, config: RunConfig, created: CreatedRuns, make: Callable[[RunConfig], Handlers]) -> None:
        self.config = config
        self.created = created
        self._make = make
        self._handlers: dict[str, Handlers] = {}

    async def find(self, run: str) -> Handlers:
        """Of a run by its name; an empty one is the gateway's own."""
        run = run or self.config.run
        if run not in self._handlers:
            if run == self.config.run:
                config = self.config
            elif (created := await self.created.get(run)) is not None:
                config = created.config_at(self.config)
            else:
                raise NotFound(
                    f"run {run!r} is not served here; this gateway serves {self.config.run!r} and what was created"
                )
            handlers = await asyncio.to_thread(self._make, config)
            self._handlers.setdefault(run, handlers)
        return self._handlers[run]

    async def peer_of(self, handling: Any, run: str) -> Any:
        """What `handling` is to its run, for another one."""
        return (await self.find(run)).of_kind(type(handling))

    async def close(self) -> None:
        for handlers in self._handlers.values():
            await handlers.generation.close()
