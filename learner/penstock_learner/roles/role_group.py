"""Calls the ranks of a role: all at once, with one deadline, and with one error that names the role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from penstock.errors import PenstockError, ProcessDied, RoleDied

logger = logging.getLogger(__name__)
OTHER_ERRORS_S = 5.0
"""How long to wait for the errors of other ranks after one has failed. When a rank dies, another rank may report a lost
connection first, which does not explain the failure."""


async def gather_all(*calls: Awaitable[Any]) -> list[Any]:
    """The results of all calls. Waits for every call to end, then raises the first error if there was one."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class RoleGroup:
    """The actors of one role, rank by rank.

    `make_actors` makes a complete new set and is given the set's number. Only one set may exist at a time."""

    def __init__(self, name: str, make_actors: Callable[[int], list[Any]], timeout_s: float) -> None:
        self.name = name
        self.make_actors = make_actors
        self.timeout_s = timeout_s
        self.actors: list[Any] = []
        self.num_sets = 0
        self.is_up = False
        """Whether the newest set was started completely. Its ranks may have died since."""

    @property
    def num_ranks(self) -> int:
        return len(self.actors)

    async def start(self) -> None:
        """Kill the actors of the earlier set, make a new set, form its process group and load the model."""
        self.is_up = False
        for actor in self.actors:
            ray.kill(actor)
        self.num_sets += 1
        self.actors = self.make_actors(self.num_sets)
        rendezvous = await self.call_rank(0, "rendezvous")
        await self.call_all("join", rendezvous)
        await self.call_all("load")
        self.is_up = True

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        """Make the same call to every rank."""
        return await self.call_each(method, [arguments] * self.num_ranks)

    async def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call every rank, rank i with arguments[i]. Returns all results, or raises one error."""
        references = [getattr(actor, method).remote(*own) for actor, own in zip(self.actors, arguments, strict=True)]
        return await self._gather(method, references, self.timeout_s)

    async def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        reference = getattr(self.actors[rank], method).remote(*arguments)
        return (await self._gather(method, [reference], self.timeout_s))[0]

    async def call_beside(self, lane: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call rank 0 in the lane's thread, which runs beside training."""
        reference = getattr(self.actors[0], method).options(concurrency_group=lane).remote(*arguments)
        return (await self._gather(method, [reference], timeout_s))[0]

    async def call_all_beside(self, lane: str, method: str, *arguments: Any) -> list[Any]:
        """Call every rank in the lane's thread, which runs beside training."""
        references = [
            getattr(actor, method).options(concurrency_group=lane).remote(*arguments) for actor in self.actors
        ]
        return await self._gather(method, references, self.timeout_s)

    async def _gather(self, method: str, references: list[Any], timeout_s: float) -> list[Any]:
        calls = [asyncio.ensure_future(reference) for reference in references]
        try:
            _, running = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            errors = [error for call in calls if call.done() and (error := call.exception())]
            if running and errors:
                await asyncio.wait(running, timeout=OTHER_ERRORS_S)
                errors = [error for call in calls if call.done() and (error := call.exception())]
            elif running:
                raise RoleDied(
                    self.name,
                    f"{self.name}.{method} did not finish in {timeout_s:.0f} s; a rank hangs or is overloaded "
                    "(see its log, or raise learner.rank_timeout_s)",
                )
            if errors:
                raise self._explained(method, errors)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    def _explained(self, method: str, errors: list[BaseException]) -> BaseException:
        """The error that explains the others. If a rank died, that explains the errors of the other ranks."""
        if any(isinstance(error, RayActorError) for error in errors):
            return RoleDied(self.name, f"a rank of the {self.name} role died in {method}")
        error = errors[0]
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, PenstockError):
            return cause
        return ProcessDied(f"{self.name}.{method} failed: {type(cause).__name__}: {cause}")
