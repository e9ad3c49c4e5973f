"""Sessions as people look at them: a tree of calls, with the tokens, their versions and the rewards of the paths.

The whole tree is always described. Its tokens are bounded, because a session may have millions of them.
"""

from __future__ import annotations

import asyncio

import numpy as np

from penstock.codec import FINISH_TO_PROTO, sampling_to_proto
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock.sessions.session_store import SessionStore, SessionSummary
from penstock.token_text import TokenText
from penstock.v1 import sessions_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation
from penstock_services.gateway.sessions.tree import Call, SessionTree

DEFAULT_TOKENS = 20_000
MAX_TOKENS = 100_000


class SessionHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, store: SessionStore, texts: TokenText) -> None:
        self.config = config
        self.audit = audit
        self.store = store
        self.texts = texts

    @operation("read")
    async def get_session(self, request: sessions_pb2.GetSessionRequest) -> sessions_pb2.Session:
        validation.check_name("session_id", request.session_id)
        if request.from_call < 0:
            raise InvalidInput("from_call", "must not be negative")
        if not 0 <= request.max_tokens <= MAX_TOKENS:
            raise InvalidInput("max_tokens", f"must be 0 to {MAX_TOKENS}; 0 takes {DEFAULT_TOKENS}")
        summary, entries = await self.store.read(request.session_id)
        max_tokens = request.max_tokens or DEFAULT_TOKENS
        return await asyncio.to_thread(self._describe, summary, entries, request.from_call, max_tokens)

    @operation("read")
    async def list_sessions(self, request: sessions_pb2.ListSessionsRequest) -> sessions_pb2.ListSessionsResponse:
        page_size = validation.checked_page_size(request.page_size)
        first = int(validation.decode_page_token("sessions", request.page_token, "[0-9]{1,9}") or 0)
        found = await self.store.summaries(first, page_size + 1)
        token = validation.encode_page_token("sessions", first + page_size) if len(found) > page_size else ""
        summaries = [_summary(one) for one in found[:page_size]]
        return sessions_pb2.ListSessionsResponse(sessions=summaries, next_page_token=token)

    def _describe(
        self, summary: SessionSummary, entries: list[bytes], from_call: int, max_tokens: int
    ) -> sessions_pb2.Session:
        tree = SessionTree()
        tree.add(entries)
        answer = sessions_pb2.Session(summary=_summary(summary))
        for number, call in enumerate(tree.calls):
            if not call.call_id:  # It repeats another one.
                continue
            node = _node(tree, number)
            if number >= from_call and max_tokens > 0:
                max_tokens -= self._add_tokens(node, tree, number, max_tokens)
            answer.calls.append(node)
        for line, trained in tree.trained_paths():
            path = answer.paths.add(calls=line, trained_calls=sorted(trained))
            path.num_trained_tokens = sum(len(tree.calls[number].token_ids) for number in trained)
            if summary.reward is not None:
                path.reward = summary.reward.reward
        return answer

    def _add_tokens(self, node: sessions_pb2.SessionNode, tree: SessionTree, number: int, max_tokens: int) -> int:
        """Add the first `max_tokens` tokens of a call. Returns how many it has added."""
        call = tree.calls[number]
        inserted = _inserted(tree, number)[:max_tokens]
        sampled = call.token_ids[: max_tokens - len(inserted)]
        node.inserted_token_ids = inserted.astype("<i4").tobytes()
        node.token_ids = sampled.astype("<i4").tobytes()
        node.log_probs = call.log_probs[: len(sampled)].astype("<f4").tobytes()
        node.policy_versions = _versions(call)[: len(sampled)].astype("<i8").tobytes()
        if self.texts.is_known:
            node.inserted_tokens[:] = self.texts.tokens(inserted.tolist())
            node.tokens[:] = self.texts.tokens(sampled.tolist())
        return len(inserted) + len(sampled)


def _node(tree: SessionTree, number: int) -> sessions_pb2.SessionNode:
    call, parent = tree.calls[number], tree.parent(number)
    num_before = 0 if parent is None else tree.calls[parent].num_tokens
    return sessions_pb2.SessionNode(
        number=number,
        parent=-1 if parent is None else parent,
        server_id=call.server_id,
        finish_reason=FINISH_TO_PROTO[call.finish_reason],
        sampling=sampling_to_proto(call.sampling),
        finished_at_ms=call.finished_at_ms,
        num_prompt_tokens=call.num_prompt_tokens,
        num_inserted=call.num_prompt_tokens - num_before,
        num_sampled=len(call.token_ids),
    )


def _inserted(tree: SessionTree, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The part of a call's prompt that comes after its parent's tokens."""
    return tree.prompt_ids(number) if tree.parent(number) is None else tree.calls[number].extra


def _versions(call: Call) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The policy version of each sampled token."""
    versions = np.zeros(len(call.token_ids), dtype=np.int64)
    for segment in call.segments:
        versions[segment.start : segment.end] = segment.policy_version
    return versions


def _summary(session: SessionSummary) -> sessions_pb2.SessionSummary:
    message = sessions_pb2.SessionSummary(
        session_id=session.session_id,
        state=session.state.upper(),
        task_id=session.task_id,
        num_calls=session.num_calls,
        num_bytes=session.num_bytes,
        prompt_ids=session.prompt_ids or (),
    )
    if session.reward is not None:
        message.reward = session.reward.reward
        message.reward_parts.update(session.reward.parts)
    return message
