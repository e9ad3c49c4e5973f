"""Calls from the server to EngineCore and its workers. Every call has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from penstock.errors import Unavailable

CONTROL_TIMEOUT_S = 60.0
"""Timeout of a call to EngineCore, which answers between two decode steps."""
LOAD_TIMEOUT_S = 600.0
FLIP_TIMEOUT_S = LOAD_TIMEOUT_S + 2 * CONTROL_TIMEOUT_S
"""Timeout of a flip inside EngineCore: the calls to verify and to load the stage, and the steps in between."""

_T = TypeVar("_T")


class CoreCalls:
    """Each call raises Unavailable if EngineCore is dead or does not answer in time."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._core = llm.engine_core

    async def rpc(self, method: str, *args: Any, timeout_s: float = CONTROL_TIMEOUT_S) -> list[Any]:
        """Call a method of every worker. Returns the results in rank order."""
        result = await answer_of(self._llm.collective_rpc(method, timeout=timeout_s, args=args), timeout_s)
        return list(result)

    async def pause(self, *, clear_cache: bool) -> None:
        """Returns when no step is in flight. Running requests stay."""
        await answer_of(self._core.pause_scheduler_async(mode="keep", clear_cache=clear_cache))

    async def resume(self) -> None:
        await answer_of(self._core.resume_scheduler_async())

    async def flip(
        self, policy_version: int, bucket_checksums: list[str], salt: str, *, clear_cache: bool
    ) -> tuple[str, float, list[tuple[float, float]]]:
        """Verify the stage, pause, load it and resume, all inside EngineCore: see core_flip.py."""
        call = self._core.call_utility_async("penstock_flip", policy_version, bucket_checksums, salt, clear_cache)
        mismatch, paused_s, timings = await answer_of(call, FLIP_TIMEOUT_S)
        return mismatch, paused_s, timings


async def answer_of(call: Awaitable[_T], timeout_s: float = CONTROL_TIMEOUT_S) -> _T:
    """Await a call to EngineCore. Raises Unavailable if it is dead or does not answer in time."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise Unavailable(f"vLLM's EngineCore did not answer within {timeout_s:g} s") from error
    except EngineDeadError as error:
        raise Unavailable("vLLM's EngineCore has died; restart the rollout server") from error
