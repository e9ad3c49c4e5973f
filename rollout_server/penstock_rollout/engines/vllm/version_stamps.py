"""Stamps the tokens of vLLM with the policy version that produced them, as they arrive in the server's process.

vLLM itself reports versions only since 0.32, and GPU hosts may be bound to 0.26 by their driver and CUDA. So no vLLM is
asked for them. A test compares these stamps with those of vLLM 0.32.

The stamps are exact. When EngineCore flips a version (worker.py), it sends a mark: after the last token of the old
version and before the first of the new one, on the same socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.trajectory import VersionSegment
from penstock_rollout.engines.engine import segments_of

VERSION_MARK = "penstock-version-"
"""An output of EngineCore whose request id is this and a version marks where the tokens of that version begin. vLLM's
output handler ignores it, because there is no such request."""


def begin_version(core: Any, policy_version: int) -> None:
    """Set the version of all tokens from now on. EngineCore calls it while no step is in flight. vLLM's own stamps
    follow, where it has them."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    if hasattr(core, "set_weight_version"):
        core.set_weight_version(str(policy_version))
    mark = EngineCoreOutput(f"{VERSION_MARK}{policy_version}", [])
    core.output_queue.put_nowait((0, EngineCoreOutputs(outputs=[mark])))


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


class VersionStamps:
    """Which version produced which token of a request. Create it before the first call to EngineCore: it replaces the
    output queue, and the task that reads EngineCore's socket uses the queue that exists when it starts. Requests have
    the id under which they were submitted."""

    def __init__(self, llm: Any) -> None:
        assert llm.engine_core.resources.output_queue_task is None
        self._states = llm.output_processor.request_states
        self.policy_version = -1
        """The version of the tokens that arrive now. Set it before the first request; then EngineCore's marks do."""
        self._requests: dict[str, _Stamped] = {}
        llm.engine_core.outputs_queue = _ArrivalQueue(self._stamp)

    @contextmanager
    def of(self, request_id: str) -> Iterator[None]:
        """Within the block, the tokens of the request are stamped."""
        self._requests[request_id] = _Stamped()
        try:
            yield
        finally:
            del self._requests[request_id]

    def segments(self, request_id: str, completion: Any, start: int) -> tuple[VersionSegment, ...]:
        """Return the versions of the tokens that came with `completion`, of which `start` is the first."""
        return segments_of(self._requests[request_id].starts, start, start + len(completion.token_ids))

    def _stamp(self, arrived: Any) -> None:
        if isinstance(arrived, Exception):
            return
        for output in arrived.outputs:
            state = self._states.get(output.request_id)  # None if the request was aborted
            if state is None and output.request_id.startswith(VERSION_MARK):
                self.policy_version = int(output.request_id.removeprefix(VERSION_MARK))
            stamped = self._requests.get(state.external_req_id) if state is not None else None
            if stamped is not None and output.new_token_ids:
                stamped.add(len(output.new_token_ids), self.policy_version)


class _ArrivalQueue(asyncio.Queue[Any]):
    """The queue between the task that reads EngineCore's socket and vLLM's output handler."""

    def __init__(self, on_arrival: Callable[[Any], None]) -> None:
        super().__init__()
        self._on_arrival = on_arrival

    def put_nowait(self, item: Any) -> None:
        self._on_arrival(item)
        super().put_nowait(item)
