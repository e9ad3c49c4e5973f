"""A role's ranks as one thing to call: every rank at once, one deadline, one error that names the role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from penstock.errors import PenstockError, ProcessDied, RoleDied

logger = logging.getLogger(__name__)
SETTLE_S = 5.0
"""When a call failed on one rank, so long the others get to say why: a rank whose peer died says only that it lost its
connection, and may say so first."""


async def all_ended(*calls: Awaitable[Any]) -> list[Any]:
    """The results, once every call has ended; the first error where there was one. None is left running."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class RoleGroup:
    """Handles of the actors of one role, rank by rank.

    `make_actors` makes a whole new set, of which there may be only one at a time; it is given the set's number."""

    def __init__(self, name: str, make_actors: Callable[[int], list[Any]], timeout_s: float) -> None:
        self.name = name
        self.make_actors = make_actors
        self.timeout_s = timeout_s
        self.actors: list[Any] = []
        self.num_sets = 0
        self.is_up = False
        """Whether the newest set has been started to the end. Its ranks may have died since."""

    @property
    def num_ranks(self) -> int:
        return len(self.actors)

    async def start(self) -> None:
        """Make the actors, form their process group, then load the model, on every rank. Ends those there are."""
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
        """The same call to every rank."""
        return await self.call_each(method, [arguments] * self.num_ranks)

    async def call_each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Rank i gets arguments[i]. All succeed, or one error is raised."""
        references = [getattr(actor, method).remote(*own) for actor, own in zip(self.actors, arguments, strict=True)]
        return await self._gather(method, references, self.timeout_s)

    async def call_rank(self, rank: int, method: str, *arguments: Any) -> Any:
        reference = getattr(self.actors[rank], method).remote(*arguments)
        return (await self._gather(method, [reference], self.timeout_s))[0]

    async def call_beside(self, lane: str, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Rank 0, in the lane's thread, which runs beside its training."""
        reference = getattr(self.actors[0], method).options(concurrency_group=lane).remote(*arguments)
        return (await self._gather(method, [reference], timeout_s))[0]

    async def call_all_beside(self, lane: str, method: str, *arguments: Any) -> list[Any]:
        """Every rank, in the lane's thread, which runs beside its training."""
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
                await asyncio.wait(running, timeout=SETTLE_S)
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
        """The one error that explains them all: a death before what it did to the other ranks."""
        if any(isinstance(error, RayActorError) for error in errors):
            return RoleDied(self.name, f"a rank of the {self.name} role died in {method}")
        error = errors[0]
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, PenstockError):
            return cause
        return ProcessDied(f"{self.name}.{method} failed: {type(cause).__name__}: {cause}")
