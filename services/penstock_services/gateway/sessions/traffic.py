"""Counts how much of the history of session calls their servers have cached."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.v1 import generate_pb2
from penstock_services.gateway.sessions.recorder import SessionCall


@dataclass
class SessionTraffic:
    """Counts of the recorded calls of one run. Only the event loop may write and read them."""

    num_calls: int = 0
    num_continued: int = 0
    """Calls that continue an earlier one from the ids that were sampled."""
    num_forked: int = 0
    """Calls of a session with earlier calls that continue none of them."""
    num_moved: int = 0
    """Continued calls whose server is not the one that answered before."""
    history_tokens: int = 0
    """Tokens of the earlier conversation in the prompts of continued calls."""
    cached_tokens: int = 0
    """Part of the history tokens: the server has answered that part of the conversation before."""

    def add(self, call: SessionCall, answer: generate_pb2.GenerateChunk) -> None:
        self.num_calls += 1
        if call.continued is None:
            self.num_forked += bool(call.tree.calls)
            return
        self.num_continued += 1
        continued = call.tree.calls[call.continued]
        self.num_moved += continued.server_id != answer.server_id
        self.history_tokens += continued.num_tokens
        self.cached_tokens += call.tree.cached_tokens(call.continued, answer.server_id)
