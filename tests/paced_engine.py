"""An engine whose tokens count up from the length of what it has read, and that stops where a test wants it to."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass, field

from penstock.trajectory import FinishReason, VersionSegment
from penstock_rollout.engines.engine import EngineStats, GenerateRequest, TokenChunk

FIRST_ID = 10
"""Ids below are special tokens."""
NUM_IDS = 40


def token_at(position: int) -> int:
    """The token that follows `position` tokens of prompt and response, whichever request samples it."""
    return FIRST_ID + position % NUM_IDS


@dataclass
class PacedEngine:
    """Samples up to `pause_after[sample]` tokens of a response, then waits for `go_on` or an interruption."""

    policy_version: int = 0
    pause_after: dict[int, float] = field(default_factory=dict)
    """Tokens that a request samples before it waits, by the number of its sample. The others do not wait."""
    bad_after: float = math.inf
    """Log-probs after this position are not finite."""
    num_sampled: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted: set[str] = field(default_factory=set)
    name: str = "paced"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        prompt, limit = len(request.prompt_token_ids), request.sampling.max_tokens
        pause = self.pause_after.get(int(request.request_id.split(".")[2]), math.inf)
        sampled = delivered = 0
        reason: FinishReason | None = None
        while reason is None:
            if sampled >= pause:
                while not self.go_on.is_set() and request.request_id not in self.interrupted:
                    await asyncio.sleep(0.002)
            if request.request_id in self.interrupted:
                reason = "aborted"
            else:
                sampled += 1
                self.num_sampled += 1
                reason = "length" if sampled == limit else None
            if reason or (request.stream and sampled - delivered >= request.min_chunk_tokens):
                yield self._chunk(prompt, delivered, sampled, reason)
                delivered = sampled

    def _chunk(self, prompt: int, start: int, end: int, reason: FinishReason | None) -> TokenChunk:
        ids = tuple(token_at(prompt + index) for index in range(start, end))
        log_probs = tuple(
            math.nan if prompt + index >= self.bad_after else -1 / token for index, token in enumerate(ids, start)
        )
        segments = (VersionSegment(start, end, self.policy_version),) if end > start else ()
        return TokenChunk(ids, log_probs, segments, reason)

    async def interrupt(self, request_ids: Collection[str]) -> None:
        self.interrupted |= set(request_ids)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0)
