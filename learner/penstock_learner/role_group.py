"""A role's ranks as one thing to call: every rank at once, one deadline, one error that names the role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from penstock.errors import DeadlineExceeded, PenstockError, ProcessDied


class RoleGroup:
    """Handles of the actors of one role, rank by rank."""

    def __init__(self, name: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.name = name
        self.actors = list(actors)
        self.timeout_s = timeout_s

    @property
    def num_ranks(self) -> int:
        return len(self.actors)

    async def start(self) -> None:
        """Form the process group, then load the model, on every rank."""
        rendezvous = await self.call_rank(0, "rendezvous")
        await self.call_all("join", rendezvous)
        await self.call_all("load")

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

    async def _gather(self, method: str, references: list[Any], timeout_s: float) -> list[Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.gather(*references)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"{self.name}.{method} did not finish in {timeout_s:.0f} s; a rank hangs or is overloaded "
                "(see its log, or raise learner.rank_timeout_s)"
            ) from error
        except RayActorError as error:
            raise ProcessDied(
                f"a rank of the {self.name} role died in {method}; restart the learner, it resumes from its checkpoint"
            ) from error
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PenstockError):
                raise cause from error
            raise ProcessDied(f"{self.name}.{method} failed: {type(cause).__name__}: {cause}") from error
