"""Engines that answer without a model, and a model folder that contains only a tokenizer."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock.config.rollout import AgentsConfig
from penstock.config.run import RunConfig
from penstock.errors import InvalidInput
from penstock.internal_calls import ClusterKey
from penstock.store.fleet import Fleet, ServerRecord
from penstock.trajectory import FinishReason, Prompt, Sampling, VersionSegment
from penstock.v1 import generate_pb2_grpc
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.tool_calls import ToolCallParser, parse_hermes
from penstock_rollout.agents.tools import Tool
from penstock_rollout.agents.transcript import AgentContext, Toolbox
from penstock_rollout.engines.engine import EngineStats, GenerateRequest, TokenChunk
from penstock_rollout.fleet.membership import make_listener
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import Tokenization

LOG_PROB = -0.25
SPECIAL = ("<|end|>", "<|other_end|>", "<|start|>", "<tool_call>", "</tool_call>")
END, OTHER_END, START = 0, 1, 2
TEXT = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789{}[]()\":,.;+-*/=_<>|'!?\n"
MERGES = (("a", "b"), ("ab", "c"), ("o", "k"))

CHATML = (
    "{% if tools %}<|start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<|start|>user\n[{{ message.content }}]<|end|>\n"
    "{% else %}<|start|>{{ message.role }}\n{{ message.content | trim }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""A template like Qwen's: every message ends with the stop token and a new line."""
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template without special tokens. The stop token that the model samples is not in it."""


def make_tokenizer_folder(folder: Path, chat_template: str = CHATML) -> Path:
    """Write a BPE tokenizer that merges `ab` and `abc`. The ids of `a`, `b`, `c` decode to text with another id."""
    characters = TEXT.replace(" ", "\u0120").replace("\n", "\u010a")  # the byte-level alphabet's names
    tokens = [*SPECIAL, *characters, *("".join(pair) for pair in MERGES)]
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": token.startswith("<|")}
        for index, token in enumerate(SPECIAL)
    ]  # fmt: skip
    model = {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in MERGES], "unk_token": None}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level,
                 "model": model}  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    described = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": len(vocab)}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, OTHER_END]}))
    return folder


def spelled(text: str) -> tuple[int, ...]:
    """Return one id per character. A model may sample these ids, but the tokenizer never returns them."""
    return tuple(len(SPECIAL) + TEXT.index(character) for character in text)


def called(body: str) -> tuple[int, ...]:
    """Return the ids of a Hermes tool call, spelled out, and of the end of the turn."""
    return (SPECIAL.index("<tool_call>"), *spelled(body), SPECIAL.index("</tool_call>"), END)


@dataclass
class ScriptedEngine:
    """Answers the requests of each sample with the turns of `script`, one after the other, in two chunks each."""

    script: Sequence[Sequence[int]]
    versions: Sequence[int] = (0,)
    """Version of each turn. The last one applies to all further turns."""
    requests: list[GenerateRequest] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    hold: Callable[[GenerateRequest], asyncio.Event | None] = lambda request: None
    """If it returns an event for a request, the request waits for it in the middle of its tokens."""
    name: str = "scripted"

    @property
    def policy_version(self) -> int:
        return self.versions[0]

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        assert request.request_id not in self.running
        if request.constraint is not None:
            raise InvalidInput("response_format", "a script cannot be constrained")
        self.requests.append(request)
        self.running.add(request.request_id)
        turn = int(request.request_id.rpartition(".")[2])
        version = self.versions[min(turn, len(self.versions) - 1)]
        ids = tuple(self.script[turn])
        is_cut = len(ids) > request.sampling.max_tokens or ids[-1] not in (END, OTHER_END)
        ids = ids[: request.sampling.max_tokens]
        finish_reason: FinishReason = "length" if is_cut else "stop"
        middle = len(ids) // 2
        try:
            yield _chunk(ids, 0, middle, version, None)
            if event := self.hold(request):
                await event.wait()
            yield _chunk(ids, middle, len(ids), version, finish_reason)
        finally:
            self.running.discard(request.request_id)

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), 0, 0.0)


def _chunk(ids: tuple[int, ...], start: int, end: int, version: int, reason: FinishReason | None) -> TokenChunk:
    segments = (VersionSegment(start, end, version),) if end > start else ()
    return TokenChunk(ids[start:end], (LOG_PROB,) * (end - start), segments, reason)


def make_context(
    engine: Any,
    tokenization: Tokenization,
    *,
    tools: Sequence[Tool] = (),
    interactions: dict[str, Interaction] | None = None,
    extra_info: dict[str, Any] | None = None,
    max_tokens: int = 1000,
    max_model_len: int = 4096,
    parse_calls: ToolCallParser = parse_hermes,
    seed: int | None = None,
    **config: Any,
) -> AgentContext:
    toolbox = Toolbox({tool.name: tool for tool in tools})
    prompt = Prompt(messages=(("user", "hi"),), extra_info=extra_info or {})
    return AgentContext(
        engine=engine,
        tokenization=tokenization,
        request_id="7.1.0",
        prompt=prompt,
        prompt_token_ids=tokenization.prompt_ids(prompt, toolbox.schemas),
        sampling=Sampling(max_tokens=max_tokens, seed=seed),
        config=AgentsConfig(**config),
        max_model_len=max_model_len,
        toolbox=toolbox,
        parse_calls=parse_calls,
        interactions=interactions or {},
        metrics=RolloutMetrics(CollectorRegistry()),
    )


def function_schema(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}


ANSWER = (*spelled("abc ok"), END)
"""Encoding its text gives other ids."""


@dataclass
class TalkingEngine:
    """Says ANSWER. The log-probs of all tokens differ."""

    policy_version: int = 3
    name: str = "talking"
    requests: list[GenerateRequest] = field(default_factory=list)
    sampled: list[tuple[float, ...]] = field(default_factory=list)
    """The log-probs of each answer."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        first = sum(map(len, self.sampled))
        log_probs = tuple(-(first + place + 1) / 1024 for place in range(len(ANSWER)))
        self.sampled.append(log_probs)
        yield TokenChunk(ANSWER, log_probs, (VersionSegment(0, len(ANSWER), self.policy_version),), "stop")


@asynccontextmanager
async def serving(
    config: RunConfig, client: Any, folder: Path, engines: Mapping[str, Any], *, heartbeats: bool = False
) -> AsyncIterator[None]:
    """Serve with these engines, by server id."""
    fleet, tokenization = Fleet(client, config.run), Tokenization(folder)
    records = []
    async with AsyncExitStack() as stack:
        for server_id, engine in engines.items():
            server = make_listener(ClusterKey.of(config))
            service = GenerateService(config.run, server_id, engine, tokenization, 4096)
            generate_pb2_grpc.add_GenerateServiceServicer_to_server(service, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            records.append(ServerRecord(server_id, f"127.0.0.1:{port}", engine.name, policy_version=3))
            await fleet.join(records[-1])
            await fleet.set_state(server_id, "READY")
        if heartbeats:
            beating = asyncio.create_task(_beat(fleet, records))
            stack.callback(beating.cancel)
        yield


async def _beat(fleet: Fleet, records: Sequence[ServerRecord]) -> None:
    while True:
        await asyncio.sleep(2)
        for record in records:
            await fleet.report(record)


FIRST_ID = 10
"""Ids below are special tokens."""
NUM_IDS = 40


def token_at(position: int) -> int:
    """The token that follows `position` tokens of prompt and response, whichever request samples it."""
    return FIRST_ID + position % NUM_IDS


@dataclass
class PacedEngine:
    """Samples up to `pause_after[sample]` tokens of a response, then waits for `go_on` or an interruption."""

    policy_version: int = 0
    pause_after: dict[int, float] = field(default_factory=dict)
    """Tokens that a request samples before it waits, by the number of its sample. The others do not wait."""
    bad_after: float = math.inf
    """Log-probs after this position are not finite."""
    num_sampled: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted: set[str] = field(default_factory=set)
    name: str = "paced"

    async def generate(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        prompt, limit = len(request.prompt_token_ids), request.sampling.max_tokens
        pause = self.pause_after.get(int(request.request_id.split(".")[2]), math.inf)
        sampled = delivered = 0
        reason: FinishReason | None = None
        while reason is None:
            if sampled >= pause:
                while not self.go_on.is_set() and request.request_id not in self.interrupted:
                    await asyncio.sleep(0.002)
            if request.request_id in self.interrupted:
                reason = "aborted"
            else:
                sampled += 1
                self.num_sampled += 1
                reason = "length" if sampled == limit else None
            if reason or (request.stream and sampled - delivered >= request.min_chunk_tokens):
                yield self._chunk(prompt, delivered, sampled, reason)
                delivered = sampled

    def _chunk(self, prompt: int, start: int, end: int, reason: FinishReason | None) -> TokenChunk:
        ids = tuple(token_at(prompt + index) for index in range(start, end))
        log_probs = tuple(
            math.nan if prompt + index >= self.bad_after else -1 / token for index, token in enumerate(ids, start)
        )
        segments = (VersionSegment(start, end, self.policy_version),) if end > start else ()
        return TokenChunk(ids, log_probs, segments, reason)

    async def interrupt(self, request_ids: Collection[str]) -> None:
        self.interrupted |= set(request_ids)

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, 0.0)
