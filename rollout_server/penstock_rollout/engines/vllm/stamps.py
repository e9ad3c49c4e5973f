"""Record which policy version produced which token of a vLLM request.

vLLM 0.32 and newer report it: EngineCore labels the outputs of every step, and the front end keeps the spans of a
request. Older versions do not, so Penstock stamps EngineCore's outputs as they arrive in this process.

These stamps are exact. When EngineCore flips a version (core_flip.py), it sends a mark: after the last token of the old
version and before the first of the new one, on the same socket. Where the server flips it by several calls, EngineCore
answers the pause when no step is in flight, and the answer follows the tokens on the same socket. So when the answer is
here, every token of the old version has arrived, even if vLLM's output handler has not processed it yet. No token of
the new version exists before the scheduler is resumed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.trajectory import VersionSegment

VERSION_MARK = "penstock-version-"
"""An output of EngineCore whose request id is this and a version marks where the tokens of that version begin. vLLM's
output handler ignores it, because there is no such request."""


class VersionStamps(Protocol):
    """Tracks requests by the id under which they were submitted, from `begin` to `end`."""

    async def set_version(self, policy_version: int) -> None:
        """Set the version of all tokens from now on. Call it before the first request, or while nothing decodes.

        A flip inside EngineCore (core_flip.py) sets it without this call."""
        ...

    def begin(self, request_id: str) -> None:
        """Call it before a request is submitted, for the first time or again."""
        ...

    def end(self, request_id: str) -> None: ...

    def has_token(self, request_id: str) -> bool: ...

    def segments(self, request_id: str, completion: Any, start: int, end: int) -> tuple[VersionSegment, ...]:
        """Return the versions of the tokens [start, end), which came with `completion`."""
        ...


def create_stamps(llm: Any) -> VersionStamps:
    return NativeStamps(llm) if reports_versions() else OwnStamps(llm)


def reports_versions() -> bool:
    """Return whether the installed vLLM reports which version produced a token."""
    from vllm.outputs import CompletionOutput

    return "weight_versions" in {field.name for field in dataclasses.fields(CompletionOutput)}


class NativeStamps:
    """Reads vLLM's own spans. vLLM reports them with the last output, and keeps them in its request state."""

    def __init__(self, llm: Any) -> None:
        self._core = llm.engine_core
        self._processor = llm.output_processor

    async def set_version(self, policy_version: int) -> None:
        await self._core.set_weight_version_async(str(policy_version))

    def begin(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None: ...

    def has_token(self, request_id: str) -> bool:
        """Also True for a request that vLLM has finished."""
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
    """The tokens of a request that have arrived."""

    num_tokens: int = 0
    starts: list[tuple[int, int]] = field(default_factory=list)
    """Each version, and the index of its first token."""

    def add(self, num_tokens: int, policy_version: int) -> None:
        if not self.starts or self.starts[-1][0] != policy_version:
            self.starts.append((policy_version, self.num_tokens))
        self.num_tokens += num_tokens


class OwnStamps:
    """Stamps tokens as they arrive. Create it before the first call to EngineCore.

    It replaces the output queue. The task that reads EngineCore's socket uses the queue that exists when it starts."""

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
            state = self._states.get(output.request_id)  # None if the request was aborted or submitted again
            if state is None and output.request_id.startswith(VERSION_MARK):
                self._policy_version = int(output.request_id.removeprefix(VERSION_MARK))
            stamped = self._requests.get(state.external_req_id) if state is not None else None
            if stamped is not None and output.new_token_ids:
                stamped.add(len(output.new_token_ids), self._policy_version)


class _ArrivalQueue(asyncio.Queue[Any]):
    """The queue between the task that reads EngineCore's socket and vLLM's output handler."""

    def __init__(self, on_arrival: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_arrival = on_arrival

    def put_nowait(self, item: Any) -> None:
        self._on_arrival(item)
        super().put_nowait(item)


def _segments(starts: list[tuple[int, int]], start: int, end: int) -> tuple[VersionSegment, ...]:
    """Return the part of [start, end) that each version produced. `starts` has the index of its first token."""
    lasts = [first for _, first in starts[1:]] + [end]
    clipped = (
        VersionSegment(max(first, start), min(last, end), version)
        for (version, first), last in zip(starts, lasts, strict=False)
    )
    return tuple(segment for segment in clipped if segment.start < segment.end)
