"""Which policy version made which token of a vLLM request.

From 0.32 on vLLM says it: EngineCore labels the outputs of every step, and the front end keeps the spans of a request.
Earlier ones say nothing, so Penstock stamps the outputs of EngineCore as they arrive in this process.

Why that is exact: EngineCore answers a pause when no step is in flight, over the socket that carries the tokens and
behind them. So once the answer is here every token of the old version has arrived, though vLLM's output handler may not
have got to it; and none of the new one exists before the scheduler is resumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.trajectory import VersionSegment


class VersionStamps(Protocol):
    """Knows requests by the id they were submitted under, from `begin` to `end`."""

    async def set_version(self, policy_version: int) -> None:
        """Stamp what comes from here on. Call it before the first request, or while the scheduler is paused."""
        ...

    def begin(self, request_id: str) -> None:
        """A request is about to be submitted, for the first time or again."""
        ...

    def end(self, request_id: str) -> None: ...

    def has_token(self, request_id: str) -> bool: ...

    def segments(self, request_id: str, completion: Any, start: int, end: int) -> tuple[VersionSegment, ...]:
        """Versions of the tokens [start, end), which came with `completion`."""
        ...


def create_stamps(llm: Any) -> VersionStamps:
    return NativeStamps(llm) if reports_versions() else OwnStamps(llm)


def reports_versions() -> bool:
    """Whether the installed vLLM says which version made a token."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in {field.name for field in dataclasses.fields(CompletionOutput)}


class NativeStamps:
    """Reads vLLM's own spans. It reports them with the last output only, but keeps them meanwhile."""

    def __init__(self, llm: Any) -> None:
        self._core = llm.engine_core
        self._processor = llm.output_processor

    async def set_version(self, policy_version: int) -> None:
        await self._core.set_weight_version_async(str(policy_version))

    def begin(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None: ...

    def has_token(self, request_id: str) -> bool:
        """True also of a request that vLLM has finished."""
        return all(self._starts(internal_id) for internal_id in self._processor.external_req_ids.get(request_id, ()))

    def segments(self, request_id: str, completion: Any, start: int, end: int) -> tuple[VersionSegment, ...]:
        if completion.finish_reason is None:
            (internal_id,) = self._processor.external_req_ids[request_id]
            return _segments(self._starts(internal_id), start, end)
        return _segments([(int(span.version), span.start) for span in completion.weight_versions or ()], start, end)

    def _starts(self, internal_id: str) -> list[tuple[int, int]]:
        state = self._processor.request_states[internal_id]
        return [(int(version), first) for version, first in state.weight_version_starts]


@dataclass
class _Stamped:
    """What has come of a request."""

    num_tokens: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Each version and the index of its first token."""

    def add(self, num_tokens: int, policy_version: int) -> None:
        if not self.starts or self.starts[-1][0] != policy_version:
            self.starts.append((policy_version, self.num_tokens))
        self.num_tokens += num_tokens


class OwnStamps:
    """Stamps what arrives. Make it before anything is asked of EngineCore: the reader of its socket keeps the queue
    that it finds."""

    def __init__(self, llm: Any) -> None:
        assert llm.engine_core.resources.output_queue_task is None
        self._states = llm.output_processor.request_states
        self._policy_version = -1
        self._requests: dict[str, _Stamped] = {}
        llm.engine_core.outputs_queue = _ArrivalQueue(self._stamp)

    async def set_version(self, policy_version: int) -> None:
        self._policy_version = policy_version

    def begin(self, request_id: str) -> None:
        self._requests[request_id] = _Stamped()

    def end(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def has_token(self, request_id: str) -> bool:
        return self._requests[request_id].num_tokens > 0

    def segments(self, request_id: str, completion: Any, start: int, end: int) -> tuple[VersionSegment, ...]:
        return _segments(self._requests[request_id].starts, start, end)

    def _stamp(self, arrived: Any) -> None:
        if isinstance(arrived, Exception):
            return
        for output in arrived.outputs:
            state = self._states.get(output.request_id)  # gone when the request was aborted, or submitted again since
            stamped = self._requests.get(state.external_req_id) if state is not None else None
            if stamped is not None and output.new_token_ids:
                stamped.add(len(output.new_token_ids), self._policy_version)


class _ArrivalQueue(asyncio.Queue[Any]):
    """What the reader of EngineCore's socket fills and vLLM's output handler empties."""

    def __init__(self, on_arrival: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_arrival = on_arrival

    def put_nowait(self, item: Any) -> None:
        self._on_arrival(item)
        super().put_nowait(item)


def _segments(starts: list[tuple[int, int]], start: int, end: int) -> tuple[VersionSegment, ...]:
    """The part of [start, end) that each version made, given the index of its first token."""
    lasts = [first for _, first in starts[1:]] + [end]
    clipped = (
        VersionSegment(max(first, start), min(last, end), version)
        for (version, first), last in zip(starts, lasts, strict=False)
    )
    return tuple(segment for segment in clipped if segment.start < segment.end)
