"""The gRPC service for generation outside of training. The gateway calls it on the internal port."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NoReturn, cast

import grpc
import numpy as np

from penstock.codec import FINISH_TO_PROTO, sampling_from_proto
from penstock.errors import InvalidInput, PenstockError, PromptTooLong
from penstock.trajectory import Prompt, Sampling
from penstock.v1 import generate_pb2, generate_pb2_grpc, groups_pb2
from penstock_rollout.engines.engine import Engine, GenerateRequest, TokenChunk
from penstock_rollout.text.streamed_text import StreamedText
from penstock_rollout.text.tokenization import Tokenization

Context = grpc.aio.ServicerContext[Any, Any]


class GenerateService(generate_pb2_grpc.GenerateServiceServicer):
    """Generates responses for clients. These requests are not leased, scored or stored."""

    def __init__(
        self, run: str, server_id: str, engine: Engine, tokenization: Tokenization, max_model_len: int
    ) -> None:
        self.run = run
        self.server_id = server_id
        self.engine = engine
        self.tokenization = tokenization
        self.max_model_len = max_model_len
        self._numbers = itertools.count()

    async def Generate(  # noqa: N802
        self, request: generate_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        if request.run not in ("", self.run):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this server belongs to run {self.run!r}")
        if request.HasField("policy_version") and request.policy_version != self.engine.policy_version:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this server serves version {self.engine.policy_version}, not {request.policy_version}",
            )
        try:
            prompt_ids = self._prompt_ids(request)
            sampling = self._sampling(request, len(prompt_ids))
            async with aclosing(cast(Any, self._chunks(request, prompt_ids, sampling))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except PenstockError as error:
            await _abort(context, error)

    async def _chunks(
        self, request: generate_pb2.GenerateRequest, prompt_ids: tuple[int, ...], sampling: Sampling
    ) -> AsyncIterator[generate_pb2.GenerateChunk]:
        """Generate, and yield a message per chunk. The first message carries the token ids of the prompt."""
        streamed = StreamedText(self.tokenization, tuple(request.stop))
        streams = request.stream or bool(request.stop)
        wanted = GenerateRequest(f"generate.{next(self._numbers)}", prompt_ids, sampling, stream=streams)
        prompt_bytes = np.asarray(prompt_ids, dtype="<i4").tobytes()
        # The protocol says AsyncIterator, but every engine returns a generator. Closing it aborts the request.
        async with aclosing(cast(Any, self.engine.generate(wanted))) as chunks:
            async for chunk in chunks:
                text = streamed.add(chunk.token_ids, chunk.finish_reason is not None)
                message = _to_proto(chunk, text, streamed.is_stopped)
                message.prompt_token_ids, message.server_id, prompt_bytes = prompt_bytes, self.server_id, b""
                yield message
                if streamed.is_stopped:
                    return

    def _prompt_ids(self, request: generate_pb2.GenerateRequest) -> tuple[int, ...]:
        if request.text:
            return self.tokenization.text_ids(request.text)
        if len(request.token_ids) % 4:
            raise InvalidInput("token_ids", f"has {len(request.token_ids)} bytes; an id has 4")
        ids = tuple(np.frombuffer(request.token_ids, dtype="<i4").tolist())
        messages = tuple((message.role, message.content) for message in request.messages)
        return self.tokenization.prompt_ids(Prompt(messages=messages, token_ids=ids))

    def _sampling(self, request: generate_pb2.GenerateRequest, num_prompt_tokens: int) -> Sampling:
        room = self.max_model_len - num_prompt_tokens
        if num_prompt_tokens < 1:
            raise InvalidInput("prompt", "has no tokens; it needs at least 1")
        if room < 1:
            raise PromptTooLong("prompt", f"has {num_prompt_tokens} tokens, more than {self.max_model_len - 1}")
        sampling = sampling_from_proto(request.sampling)
        if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1 or sampling.max_tokens < 0:
            raise InvalidInput(
                "sampling",
                "needs a finite temperature of 0 or more, top_p above 0 and at most 1, max_tokens not below 0",
            )
        return replace(sampling, max_tokens=min(sampling.max_tokens or room, room))


def _to_proto(chunk: TokenChunk, text: str, is_stopped: bool) -> generate_pb2.GenerateChunk:
    message = generate_pb2.GenerateChunk(
        text=text,
        token_ids=np.asarray(chunk.token_ids, dtype="<i4").tobytes(),
        log_probs=np.asarray(chunk.log_probs, dtype="<f4").tobytes(),
        segments=[
            groups_pb2.VersionSegment(start=s.start, end=s.end, policy_version=s.policy_version) for s in chunk.segments
        ],
    )
    reason = "stop" if is_stopped else chunk.finish_reason
    if reason is not None:
        message.finish_reason = FINISH_TO_PROTO[reason]
    return message


async def _abort(context: Context, error: PenstockError) -> NoReturn:
    trailing = [("reason", error.reason)]
    if isinstance(error, InvalidInput):
        trailing.append(("field", error.field))
    await context.abort(grpc.StatusCode[error.grpc_code], str(error), tuple(trailing))
    raise AssertionError("abort always raises")
