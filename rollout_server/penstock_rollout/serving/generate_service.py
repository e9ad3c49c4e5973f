"""The gRPC service for generation outside of training. The gateway calls it on the internal port."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc
import numpy as np

from penstock.codec import FINISH_TO_PROTO, messages_from_proto, sampling_from_proto
from penstock.errors import InvalidInput, ModelNotFound, PenstockError, PromptTooLong
from penstock.protocols.bodies import UNLIMITED
from penstock.protocols.conversation import Conversation
from penstock.sampling import Sampling, check_sampling
from penstock.trajectory import Prompt
from penstock.v1 import generate_pb2, generate_pb2_grpc, groups_pb2
from penstock_rollout.engines.engine import Engine, GenerateRequest, TokenChunk
from penstock_rollout.serving.tool_calling import ToolCalling, ToolCallReader, num_begun
from penstock_rollout.tokenization import Tokenization

Context = grpc.aio.ServicerContext[Any, Any]


class _OtherVersion(ModelNotFound):
    """The request is for another version. A gateway that asked too late tries another server."""


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """Generates responses for clients. These requests are not leased, scored or stored."""

    def __init__(
        self, run: str, server_id: str, engine: Engine, tokenization: Tokenization, max_model_len: int,
        tool_calling: ToolCalling | None = None,
    ) -> None:  # fmt: skip
        self.run = run
        self.server_id = server_id
        self.engine = engine
        self.tokenization = tokenization.without_limit()
        self.max_model_len = max_model_len
        self.tool_calling = tool_calling or ToolCalling("hermes", tokenization)
        self._numbers = itertools.count()

    async def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        try:
            async with aclosing(cast(Any, self._chunks(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except _OtherVersion as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except PenstockError as error:
            named = [("field", ascii(error.field)[1:-1])] if isinstance(error, InvalidInput) else []
            await context.abort(grpc.StatusCode[error.grpc_code], str(error), (("reason", error.reason), *named))

    async def _chunks(self, request: generate_pb2.GenerateRequest) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Generate, and yield a message per chunk, or raise what is wrong with the request. The first carries the
        token ids of the prompt."""
        if request.run not in ("", self.run):
            raise ModelNotFound(f"this server belongs to run {self.run!r}")
        if request.HasField("policy_version") and request.policy_version != self.engine.policy_version:
            raise _OtherVersion(
                f"this server serves version {self.engine.policy_version}, not {request.policy_version}"
            )
        prompt_ids = self._prompt_ids(request)
        if request.render_only:
            yield generate_pb2.GenerateChunk(prompt_token_ids=_bytes(prompt_ids), server_id=self.server_id)
            return
        sampling = self._sampling(request, len(prompt_ids))
        conversation = Conversation.from_request(request)
        constraint = self.tool_calling.constraint(request, conversation)
        if constraint is not None and sampling.ignore_eos:
            raise InvalidInput("ignore_eos", "cannot be combined with constrained output, which ends by itself")
        reader: ToolCallReader | None = None  # all of the answer is text
        if conversation.tools and conversation.tool_choice != generate_pb2.TOOL_CHOICE_NONE:
            reader = self.tool_calling.reader(conversation, stream=request.stream)
        stop = (*request.stop, *request.sampling.stop)
        streamed = StreamedText(self.tokenization.raw_text if reader else self.tokenization.text, stop)
        streams = request.stream or bool(stop)
        request_id = f"generate.{next(self._numbers)}"
        wanted = GenerateRequest(request_id, prompt_ids, sampling, stream=streams, constraint=constraint)
        prompt_bytes = _bytes(prompt_ids)
        # The protocol says AsyncIterator, but every engine returns a generator. Closing it aborts the request.
        async with aclosing(cast(Any, self.engine.generate(wanted))) as chunks:
            async for chunk in chunks:
                text = streamed.add(chunk.token_ids, chunk.finish_reason is not None)
                message = _to_proto(chunk, streamed.found_stop)
                if reader is None:
                    message.text = text
                else:
                    read = reader.add(text, chunk.token_ids, bool(message.finish_reason))
                    message.text = read.content
                    message.tool_calls.extend(read.tool_calls)
                message.prompt_token_ids, message.server_id, prompt_bytes = prompt_bytes, self.server_id, b""
                yield message
                if streamed.found_stop:
                    return

    def _prompt_ids(self, request: generate_pb2.GenerateRequest) -> tuple[int, ...]:
        """The ids of a prompt, or of a conversation that was sampled and the new messages or the new text after it."""
        history = tuple(np.frombuffer(request.history_token_ids, dtype="<i4").tolist())
        if request.text:
            if history:
                return self.tokenization.continued_text_ids(history, request.text)
            return self.tokenization.text_ids(request.text)
        if len(request.token_ids) % 4:
            raise InvalidInput("token_ids", f"has {len(request.token_ids)} bytes; an id has 4")
        ids = tuple(np.frombuffer(request.token_ids, dtype="<i4").tolist())
        messages, fields = messages_from_proto(request.messages)
        prompt = Prompt(messages=messages, message_fields=fields, token_ids=ids)
        conversation = Conversation.from_request(request)
        shown = conversation.tools, conversation.template_arguments
        if history:
            return self.tokenization.continued_ids(history, prompt.chat, *shown)
        return self.tokenization.prompt_ids(prompt, *shown)

    def _sampling(self, request: generate_pb2.GenerateRequest, num_prompt_tokens: int) -> Sampling:
        room = self.max_model_len - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise InvalidInput("prompt", "has no tokens; it needs at least 1")
        if room < 1:
            # Harnesses look for the words of Anthropic and vLLM in it, and then shorten their history.
            raise PromptTooLong(
                "prompt",
                f"the prompt is too long: {num_prompt_tokens} tokens, and this model's maximum context length is "
                f"{self.max_model_len} tokens with the answer; send a shorter one",
            )
        sampling = sampling_from_proto(request.sampling)
        if not sampling.max_tokens:
            sampling = replace(sampling, max_tokens=room)
        check_sampling(sampling)
        # As vLLM's own server: what no prompt could leave room for is refused, and less is cut to the room.
        if self.max_model_len < sampling.max_tokens < UNLIMITED:
            raise InvalidInput(
                "sampling.max_tokens",
                f"is {sampling.max_tokens}, more than the {self.max_model_len} tokens of the model's context; ask for "
                "fewer, or omit it to fill the context",
            )
        return replace(sampling, max_tokens=min(sampling.max_tokens, room))


def _bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def _to_proto(chunk: TokenChunk, found_stop: str) -> generate_pb2.GenerateChunk:
    """The chunk without its text. `found_stop` is the stop text that ends the answer with it, or empty."""
    message = generate_pb2.GenerateChunk(
        token_ids=_bytes(chunk.token_ids),
        log_probs=np.asarray(chunk.log_probs, dtype="<f4").tobytes(),
        segments=[groups_pb2.VersionSegment(**vars(segment)) for segment in chunk.segments],
        stop_text=found_stop,
    )
    reason = "stop" if found_stop else chunk.finish_reason
    if reason is not None:
        message.finish_reason = FINISH_TO_PROTO[reason]
    return message


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoding yields this in place of a character whose last bytes have not arrived yet."""


@dataclass
class StreamedText:
    """The text of one response, up to the first stop text.

    Text is held back while it may turn out to be part of a stop text or of an incomplete character."""

    decode: Callable[[Sequence[int]], str]
    stop: tuple[str, ...]
    found_stop: str = ""
    """The stop text that was found. The response ends before it."""
    _token_ids: list[int] = field(default_factory=list)
    _num_sent: int = 0

    def add(self, token_ids: tuple[int, ...], is_last: bool) -> str:
        """Add tokens, and return the new text that can be sent. With `is_last` nothing more is held back."""
        self._token_ids += token_ids
        text = self.decode(self._token_ids)
        places = ((text.find(stop, self._num_sent), stop) for stop in self.stop)
        found = [(place, stop) for place, stop in places if place >= 0]
        if found:
            end, self.found_stop = min(found)
        elif is_last:
            end = len(text)
        else:
            end = len(text.rstrip(INCOMPLETE)) - max((num_begun(text, one) for one in self.stop), default=0)
        sent, self._num_sent = text[self._num_sent : end], max(self._num_sent, end)
        return sent
