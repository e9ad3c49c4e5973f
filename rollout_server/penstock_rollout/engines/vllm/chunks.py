"""The tokens of a request that EngineCore has not sent yet. It runs inside EngineCore, whose Python limits the tokens a
second of a small model, so what is done for each token is little: vLLM's slice of a step's log-probs is three arrays,
and to make and to join them took an eighth of EngineCore's time. Here a token has two numbers, and there are arrays
only for what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
