"""Continues calls of a session from the ids that were sampled, and records their answers.

`prepare` finds the call that the history of a request belongs to, by message and then by text, and replaces the history
by that call's ids. The rollout server appends the new messages. `record` stores what the engine reported.

Trees are kept in memory up to `gateway.sessions.cache_bytes`, the least recently used first to go. They are a cache:
each call asks Redis for the calls that other gateways have recorded meanwhile.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.api.conversion import chat_message
from penstock.protocols.conversation import AnswerMessage
from penstock.sessions.session_store import SessionStore
from penstock.store.ownership import Owner
from penstock.v1 import generate_pb2, groups_pb2, prompts_pb2, sessions_pb2
from penstock_services.gateway.sessions.conversation_keys import MessageKeys, message_keys, text_key, text_keys
from penstock_services.gateway.sessions.tree import SessionTree


@dataclass
class SessionCall:
    """A call that is being answered."""

    session_id: str
    tree: SessionTree
    owner: Owner
    continued: int | None = None
    """The call whose ids the prompt begins with."""
    keys: MessageKeys | None = None
    text: str | None = None
    """The whole plain text of the prompt."""
    call_id: str = ""
    replaced: tuple[prompts_pb2.Message, ...] = ()
    """The messages whose ids the prompt begins with instead."""

    @property
    def server_ids(self) -> Sequence[str]:
        """Servers that have answered the session, the one that has the longest part of this call's history first."""
        calls = self.tree.calls
        newest = dict.fromkeys(call.server_id for call in reversed(calls))
        return [*newest] if self.continued is None else [calls[self.continued].server_id, *newest]

    def begin_again(self, request: generate_pb2.GenerateRequest) -> None:
        """Let the request send its history as messages again. Unless the ids are the same, the call is a fork."""
        messages = [*self.replaced, *request.messages]
        del request.messages[:]
        request.messages.extend(messages)
        request.history_token_ids = b""
        self.continued, self.replaced = None, ()


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


class SessionRecorder:
    """The sessions of one run, as one gateway sees them."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self._trees: OrderedDict[str, SessionTree] = OrderedDict()
        self.cached_bytes = 0

    async def prepare(self, request: generate_pb2.GenerateRequest, owner: Owner) -> SessionCall:
        """Read the session and let the request continue the call that its history belongs to. Changes the request."""
        tree = await self._read(request.session_id, owner)
        call = SessionCall(request.session_id, tree, owner, call_id=uuid.uuid4().hex)
        if request.messages:
            self._match_messages(call, request)
        elif request.text:
            self._match_text(call, request)
        return call

    async def record(
        self, call: SessionCall, answer: generate_pb2.GenerateChunk, request: generate_pb2.GenerateRequest
    ) -> None:
        """Store a whole answer. `request` is the one that was sent to the server, with its sampling."""
        prompt = np.frombuffer(answer.prompt_token_ids, dtype="<i4")
        base, num_shared = call.tree.split(prompt, call.continued)
        keys, num_chars = _keys_after(call, answer, has_stop=bool(request.stop or request.sampling.stop))
        stored = sessions_pb2.SessionCall(
            call_id=call.call_id, base=base, num_shared=num_shared, extra_token_ids=prompt[num_shared:].tobytes(),
            token_ids=answer.token_ids, log_probs=answer.log_probs, segments=answer.segments,
            finish_reason=answer.finish_reason, sampling=request.sampling, server_id=answer.server_id,
            conversation_keys=keys, num_chars=num_chars, finished_at_ms=int(time.time() * 1000),
        )  # fmt: skip
        list_name = call.tree.list_name if base >= 0 else ""
        await self.store.record(call.session_id, stored.SerializeToString(), call.call_id, list_name, call.owner)

    def forget(self, session_id: str) -> None:
        if tree := self._trees.pop(session_id, None):
            self.cached_bytes -= tree.num_bytes

    async def _read(self, session_id: str, owner: Owner) -> SessionTree:
        """The session's tree with all calls that are recorded now."""
        known = self._trees.get(session_id) or SessionTree()
        num_known = len(known.calls)
        list_name, entries = await self.store.open(session_id, known.list_name, num_known, owner)
        if list_name == known.list_name:
            tree = known
            entries = entries[len(known.calls) - num_known :]  # Another call may have added some meanwhile.
        else:
            tree = SessionTree(list_name)
        self.forget(session_id)
        tree.add(entries)
        self._trees[session_id] = tree
        self.cached_bytes += tree.num_bytes
        while self.cached_bytes > self.store.limits.cache_bytes and self._trees:  # the least recently used ones go
            self.cached_bytes -= self._trees.popitem(last=False)[1].num_bytes
        return tree

    def _match_messages(self, call: SessionCall, request: generate_pb2.GenerateRequest) -> None:
        others = f"{request.tools_json} {request.template_arguments_json}"
        keys = call.keys = message_keys([chat_message(message) for message in request.messages], others)
        for place in range(len(request.messages) - 1, 0, -1):
            for key in (keys.by_message[place], keys.by_text[place]):
                if (number := call.tree.by_key.get(key)) is not None:
                    _continue(call, request, number)
                    call.replaced = tuple(request.messages[:place])
                    del request.messages[:place]
                    return

    def _match_text(self, call: SessionCall, request: generate_pb2.GenerateRequest) -> None:
        call.text = request.text
        for length, key in text_keys(request.text, call.tree.text_lengths):
            number = call.tree.by_key.get(key)
            if number is not None and length < len(request.text):
                _continue(call, request, number)
                request.text = call.text[length:]
                return


def _continue(call: SessionCall, request: generate_pb2.GenerateRequest, number: int) -> None:
    call.continued = number
    request.history_token_ids = call.tree.ids(number).astype("<i4").tobytes()


def _keys_after(
    call: SessionCall, answer: generate_pb2.GenerateChunk, *, has_stop: bool
) -> tuple[tuple[bytes, ...], int]:
    """Keys of the conversation with the answer, and its number of characters if it is plain text.

    An answer that has no tokens, or was aborted, is not continued. Nor is plain text that may have ended at a stop
    text: the sampled ids then spell more than the client has seen."""
    if not answer.token_ids or answer.finish_reason == groups_pb2.Trajectory.ABORTED:
        return (), 0
    if call.keys is not None:
        whole = AnswerMessage()
        whole.add(answer)
        return call.keys.then(chat_message(whole.message.to_proto())), 0
    if call.text is not None and not has_stop:
        text = call.text + answer.text
        return (text_key(text),), len(text)
    return (), 0
