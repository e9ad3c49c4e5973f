"""vLLM's scheduler, with two additions. It runs inside EngineCore.

Chunks: vLLM sends every token of every request to the front end by itself. With hundreds of requests of a small model,
packing and unpacking them takes longer than the model. So a request says how many tokens it wants at once. EngineCore
keeps its tokens until so many are there, the request has ended, or the scheduler is paused. When a pause is answered,
every token has left: the version stamps stay exact. Tokens that are kept of an aborted request are lost.

Salts: the server salts the prefix-cache entries of a request with the load under which it submits the request. If
weights are loaded before its first token, the request gets the salt of that load, and nothing that was computed for it
before is used.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from penstock_rollout.engines.vllm.start import CHUNK_TOKENS

Row = tuple[float, int]
"""The log-prob and the rank of a sampled token."""


class StepRows:
    """Takes the place of a step's log-probs, of class LogprobsLists, in vLLM's loop over the requests."""

    __slots__ = ("_logprobs", "_ranks", "_table")

    def __init__(self, table: Any) -> None:
        self._table = table
        self._logprobs: list[float] = table.logprobs[:, 0].tolist()
        self._ranks: list[int] = table.sampled_token_ranks.tolist()

    def slice_request(self, index: int, num_tokens: int) -> Row | Any:
        """The row of the request at `index`. With several tokens, from speculation, it is vLLM's own slice."""
        if num_tokens != 1:
            return self._table.slice_request(index, num_tokens)
        starts = self._table.cu_num_generated_tokens
        row = index if starts is None else starts[index]
        return self._logprobs[row], self._ranks[row]


def as_lists(token_ids: list[int], rows: Sequence[Any], table: Any) -> Any:
    """The rows of the tokens, one after another in one list, as a LogprobsLists with the types of `table`."""
    return table._replace(
        logprob_token_ids=np.array(token_ids, table.logprob_token_ids.dtype)[:, None],
        logprobs=np.array(rows[0::2], table.logprobs.dtype)[:, None],
        sampled_token_ranks=np.array(rows[1::2], table.sampled_token_ranks.dtype),
        cu_num_generated_tokens=None,
    )


@dataclass(slots=True)
class Chunk:
    """The newest outputs of a request, until there are `size` tokens. Its log-probs are those of the sampled tokens."""

    size: int
    token_ids: list[int] = field(default_factory=list)
    _last: Any = None
    _rows: list[Any] = field(default_factory=list)
    _events: list[Any] = field(default_factory=list)
    _experts: list[Any] = field(default_factory=list)

    def add(self, output: Any) -> None:
        self._last = output
        self.token_ids += output.new_token_ids
        logprobs = output.new_logprobs
        if type(logprobs) is tuple:
            self._rows += logprobs
        elif logprobs is not None:
            for row in zip(logprobs.logprobs[:, 0].tolist(), logprobs.sampled_token_ranks.tolist(), strict=True):
                self._rows += row
        if output.events:
            self._events += output.events
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)

    def whole(self, table: Any) -> Any:
        """All outputs as one. `table` is as for `as_lists`."""
        whole = self._last
        whole.new_token_ids = self.token_ids
        whole.new_logprobs = as_lists(self.token_ids, self._rows, table) if self._rows else None
        whole.events = self._events or None
        whole.routed_experts = np.concatenate(self._experts) if self._experts else None
        return whole


class ChunkedOutputs:
    """Mixed into a scheduler class of vLLM."""

    requests: dict[str, Any]
    pause_state: PauseState

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._kept: dict[str, Chunk] = {}
        self._table: Any = None
        """The log-probs of the newest step that has some."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        table = model_runner_output.logprobs
        if table is not None:
            self._table = table
            if table.logprobs.shape[1] == 1:  # no request asks for other tokens than the sampled one
                model_runner_output.logprobs = StepRows(table)
        messages: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for message in messages.values():
            message.outputs = [whole for output in message.outputs if (whole := self._add(output)) is not None]
        if self.pause_state != PauseState.UNPAUSED:
            for request_id, kept in self._kept.items():
                message = messages.setdefault(self.requests[request_id].client_index, EngineCoreOutputs())
                message.outputs.append(kept.whole(self._table))
            self._kept.clear()
        return messages

    def _add(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return what is to be sent of the output's request now, or None."""
        kept = self._kept.get(output.request_id)
        if kept is None:
            size = self._chunk_tokens(output)
            if size == 1:
                if type(output.new_logprobs) is tuple:
                    output.new_logprobs = as_lists(output.new_token_ids, output.new_logprobs, self._table)
                return output
            kept = self._kept[output.request_id] = Chunk(size)
        kept.add(output)
        if output.finish_reason is None and len(kept.token_ids) < kept.size:
            return None
        del self._kept[output.request_id]
        return kept.whole(self._table)

    def _chunk_tokens(self, output: EngineCoreOutput) -> int:
        """How many tokens are sent together, from this output on. The first token is sent at once."""
        if output.finish_reason is not None or output.prefill_stats is not None:
            return 1
        settings = self.requests[output.request_id].sampling_params.extra_args or {}
        return int(settings.get(CHUNK_TOKENS, 1))

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> Any:
        finished = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in finished:
            self._kept.pop(request.request_id, None)
        return finished

    def has_requests(self) -> bool:
        """True also for kept tokens of a paused scheduler: EngineCore takes one more step, which sends them."""
        is_paused = self.pause_state != PauseState.UNPAUSED
        return bool(super().has_requests() or (is_paused and self._kept))  # type: ignore[misc]


class SaltedRequests:
    """Mixed into a scheduler class of vLLM. A request never finds KV of another load than the one it starts under."""

    requests: dict[str, Any]
    running: list[Any]
    prev_step_scheduled_req_ids: set[str]
    _preempt_request: Any

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._salt: str | None = None

    def begin_load(self, salt: str) -> None:
        """Let the requests without a token start under the weights that were just loaded, whose salt this is. Call it
        while the scheduler is paused and no step is in flight."""
        self._salt = salt
        unstarted = [request for request in self.requests.values() if request.num_output_tokens == 0]
        for request in reversed(unstarted):  # vLLM puts each one at the front of its queue
            if request.status == RequestStatus.RUNNING:  # a part of its prompt was computed with the old weights
                self.running.remove(request)
                self._preempt_request(request, time.monotonic())
                self.prev_step_scheduled_req_ids.discard(request.request_id)
            _set_salt(request, salt)

    def add_request(self, request: Any) -> None:
        if self._salt is not None and request.cache_salt != self._salt:
            _set_salt(request, self._salt)  # it was submitted before the server heard of the load
        super().add_request(request)  # type: ignore[misc]


def _set_salt(request: Any, salt: str) -> None:
    """The hashes of all blocks depend on the salt, because each one depends on the one before."""
    request.cache_salt = salt
    request.block_hashes.clear()
    request.update_block_hashes()


class ChunkedScheduler(ChunkedOutputs, SaltedRequests, Scheduler):  # type: ignore[misc]
    """For synchronous scheduling."""


class ChunkedAsyncScheduler(ChunkedOutputs, SaltedRequests, AsyncScheduler):  # type: ignore[misc]
    """For asynchronous scheduling, vLLM's default."""
