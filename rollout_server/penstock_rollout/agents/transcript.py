"""One sample of an agent: its context, which holds everything it may use, and its response, built turn by turn.

Invariants of a transcript, after every call:
- Sampled ids stay as the engine returned them. The prompt of the next turn is the first prompt plus exactly these ids.
- The arrays have one entry per token: mask 1 and the engine's log-prob if it was sampled, 0 and 0.0 if inserted.
- Segments cover the response without gap or overlap. Inserted tokens belong to the segment of the sampled token before
  them, so a trajectory never names a version that sampled none of its tokens.
- An episode never ends with inserted tokens. Nothing was sampled after them, so they teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from penstock.config.rollout import AgentsConfig
from penstock.errors import ConfigError, InvalidInput, PenstockError
from penstock.trajectory import ExpertIds, FinishReason, Prompt, Sampling, VersionSegment
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.saved_samples import SampleProgress
from penstock_rollout.agents.tool_calls import ToolCallParser
from penstock_rollout.agents.tools import SET_TOOLS, Tool, tools_kwargs
from penstock_rollout.engines.engine import Engine, GenerateRequest, TokenChunk
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.tokenization import Message, Tokenization


@dataclass(frozen=True)
class Toolbox:
    """The tools of a server, or the tools that one prompt may use."""

    tools: dict[str, Tool] = field(default_factory=dict)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.tool_schema for tool in self.tools.values()]

    def add(self, tool: Tool, place: str) -> None:
        """Offer one more tool. `place` says where it is declared, for the error message."""
        if tool.name in self.tools:
            raise ConfigError(f"{place}: a tool {tool.name!r} was declared already; give it another name")
        self.tools[tool.name] = tool

    def offered(self, extra_info: Mapping[str, Any]) -> Toolbox:
        """The tools that a prompt may use: all of them, or with `need_tools_kwargs` the ones in `tools_kwargs`."""
        kwargs = tools_kwargs(extra_info)
        if unknown := sorted(set(kwargs) - set(self.tools)):
            known = f"tools: {', '.join(self.tools)}" if self.tools else SET_TOOLS
            raise InvalidInput("extra_info.tools_kwargs", f"there is no tool {unknown[0]!r}; {known}")
        if not extra_info.get("need_tools_kwargs"):
            return self
        return Toolbox({name: tool for name, tool in self.tools.items() if name in kwargs})


@dataclass(frozen=True)
class AgentContext:
    """One sample of one prompt. Each sample of a group has its own context."""

    engine: Engine
    tokenization: Tokenization
    request_id: str
    """Unique to the sample. Turn t is the engine request `<request_id>.<t>`."""
    prompt: Prompt
    """`prompt.extra_info` may hold `tools_kwargs`, `need_tools_kwargs` and `interaction_kwargs`, as in verl."""
    prompt_token_ids: tuple[int, ...]
    """The rendered prompt. It is the same for every sample of the group."""
    sampling: Sampling
    """Sampling parameters, with this sample's own seed. `max_tokens` limits sampled and inserted tokens together."""
    config: AgentsConfig
    max_model_len: int
    """Upper bound on prompt plus response, in tokens."""
    toolbox: Toolbox
    """The tools that this prompt may use. Empty unless the agent is marked with `uses_tools`."""
    parse_calls: ToolCallParser
    """Parses the tool calls of a turn in the configured format."""
    interactions: Mapping[str, Interaction]
    metrics: RolloutMetrics
    progress: SampleProgress | None = None
    """Where the tokens of an unfinished sample are saved; None if they are not saved."""


AgentLoop = Callable[[AgentContext], Coroutine[Any, Any, Episode]]
"""Generates one sample. When cancelled, it must end what it started. `Transcript` and the sessions do that."""


def uses_tools(loop: AgentLoop) -> AgentLoop:
    """Mark an agent that offers tools: the chat template shows them to the model in the first prompt."""
    loop.uses_tools = True  # type: ignore[attr-defined]
    return loop


SEED_STRIDE = 1_000_003
"""Distance between the seeds of two turns. Samples of a prompt have neighbouring seeds, so this must be large."""
CONTINUED_STRIDE = 1_000_000_007
"""The same for a turn that is continued after some tokens, per token."""


@dataclass(frozen=True)
class Turn:
    token_ids: tuple[int, ...]
    """The sampled ids, including a stop token."""
    finish_reason: FinishReason


class Transcript:
    """Samples turns and inserts the replies between them. Each sample has its own transcript."""

    def __init__(self, context: AgentContext) -> None:
        self.context = context
        self.num_turns = 0
        self.num_replies = 0
        """How often messages were inserted."""
        self._token_ids: list[int] = []
        self._loss_mask: list[int] = []
        self._log_probs: list[float] = []
        self._segments: list[VersionSegment] = []
        self._experts: ExpertIds | None = None
        """[tokens, layers, top_k] for prompt and response but the last token, if the engine reports its experts."""
        self._last_turn_start = 0
        self._progress: SampleProgress | None = None
        """Set if the first turn is saved while it is sampled."""
        self._server_ids: tuple[str, ...] = ()
        """Servers that sampled it, if another one began."""

    @property
    def room(self) -> int:
        """How many tokens the response may still grow by, under both `max_tokens` and `max_model_len`."""
        context = self.context
        used = len(self._token_ids)
        by_length = context.max_model_len - len(context.prompt_token_ids) - used
        return min(context.sampling.max_tokens - used, by_length)

    def continue_saved(self) -> None:
        """Begin with the tokens that another server sampled of this response, if there are some, and save those of the
        first turn while it is sampled. An agent calls it before its first turn, or never. Only the first turn is saved
        this way. An agent that has a conversation starts again, because the state of its tools is not saved."""
        self._progress = self.context.progress
        if self._progress is None or (saved := self._progress.saved) is None:
            return
        self._token_ids, self._log_probs = list(saved.token_ids), list(saved.log_probs)
        for segment in saved.segments:
            self._append_segment(segment.start, segment.end, segment.policy_version)
        self._server_ids = tuple(dict.fromkeys((*saved.server_ids, self._progress.saver.server_id)))

    async def sample_turn(self) -> Turn:
        """Let the model generate until it stops or reaches a limit. All of these tokens are trained."""
        start = len(self._loss_mask)
        first = len(self._token_ids)
        if first > start and self._turn_room(first - start) < 1:  # a limit is lower than that of the server that began
            finish_reason: FinishReason | None = "length"
        else:
            finish_reason = await self._generate(start, first)
        self._loss_mask += [1] * (len(self._token_ids) - start)
        self._last_turn_start = start
        self.num_turns += 1
        self._progress = None
        return Turn(tuple(self._token_ids[start:]), finish_reason or "aborted")

    async def _generate(self, start: int, first: int) -> FinishReason | None:
        """Sample the turn that began at `start`, from the token at `first` on."""
        context, progress = self.context, self._progress
        request = GenerateRequest(
            f"{context.request_id}.{self.num_turns}",
            (*context.prompt_token_ids, *self._token_ids),
            self._turn_sampling(first - start),
            stream=bool(context.sampling.stop) or progress is not None,
            min_chunk_tokens=1 if context.sampling.stop or progress is None else progress.saver.every_tokens,
        )
        finish_reason: FinishReason | None = None
        with nullcontext() if progress is None else progress.sampling(request.request_id):
            # The protocol says AsyncIterator, but every engine returns a generator. Closing it aborts the request.
            async with aclosing(cast(Any, context.engine.generate(request))) as chunks:
                async for chunk in chunks:
                    finish_reason = self._take(chunk, start, first)
                    if finish_reason == "stop":
                        break
                    if progress is not None and finish_reason != "length":
                        is_last = finish_reason is not None
                        progress.add(self._token_ids, self._log_probs, self._segments, is_last=is_last)
        return finish_reason

    def _take(self, chunk: TokenChunk, start: int, first: int) -> FinishReason | None:
        """Append the tokens of a chunk, up to a stop text. Returns the reason if the turn is finished."""
        self._token_ids += chunk.token_ids
        self._log_probs += chunk.log_probs
        for segment in chunk.segments:
            self._append_segment(first + segment.start, first + segment.end, segment.policy_version)
        if (experts := chunk.routed_experts) is not None:
            # The experts of a turn cover everything from the prompt on. Tokens that were known keep theirs.
            known = self._experts
            self._experts = experts if known is None else np.concatenate([known, experts[len(known) :]])
        if self.context.sampling.stop and self._cut_at_stop(start, len(chunk.token_ids)):
            return "stop"
        return chunk.finish_reason

    def _cut_at_stop(self, start: int, num_new: int) -> bool:
        """Remove what follows a stop text in the turn that began at `start`. Returns whether there is one. The turn
        ends with the token, among the newest `num_new`, that completes the text."""
        text, stop = self.context.tokenization.text, self.context.sampling.stop
        if not any(one in text(self._token_ids[start:]) for one in stop):
            return False
        for end in range(len(self._token_ids) - num_new + 1, len(self._token_ids) + 1):
            if any(one in text(self._token_ids[start:end]) for one in stop):
                break
        del self._token_ids[end:], self._log_probs[end:]
        self._segments = [replace(s, end=min(s.end, end)) for s in self._segments if s.start < end]
        return True

    def insert(self, messages: Sequence[Message]) -> bool:
        """Append the messages as the chat template renders them, up to the start of the next turn. Returns False and
        appends nothing if no room would be left for a sampled token."""
        if not self._loss_mask or not self._loss_mask[-1]:
            raise PenstockError("an agent inserted messages without a turn before; call insert once after each turn")
        ids = self.context.tokenization.next_ids(self._token_ids[-1], messages, self.context.toolbox.schemas)
        if len(ids) >= self.room:
            return False
        start = len(self._token_ids)
        self._token_ids += ids
        self._loss_mask += [0] * len(ids)
        self._log_probs += [0.0] * len(ids)
        self._append_segment(start, len(self._token_ids), self._segments[-1].policy_version)
        self.num_replies += 1
        return True

    def episode(
        self, finish_reason: FinishReason, *, turn_rewards: Sequence[float] = (),
        token_rewards: Mapping[int, float] | None = None, final_reward: float | None = None,
        reward_parts: dict[str, float] | None = None, tool_rewards: Sequence[float] = (),
        turn_scores: Sequence[float] = (),
    ) -> Episode:  # fmt: skip
        end = len(self._token_ids)
        while end and not self._loss_mask[end - 1]:
            end -= 1
        num_routed, experts = len(self.context.prompt_token_ids) + end - 1, self._experts
        return Episode(
            token_ids=np.array(self._token_ids[:end], dtype=np.int32),
            loss_mask=np.array(self._loss_mask[:end], dtype=np.uint8),
            log_probs=np.array(self._log_probs[:end], dtype=np.float32),
            segments=tuple(replace(segment, end=min(segment.end, end)) for segment in self._segments),
            finish_reason=finish_reason,
            routed_experts=None if experts is None or len(experts) < num_routed else experts[:num_routed],
            num_turns=self.num_turns,
            last_turn_start=self._last_turn_start,
            turn_rewards=tuple(turn_rewards),
            token_rewards=dict(token_rewards or {}),
            final_reward=final_reward,
            reward_parts=reward_parts or {},
            num_user_turns=self.num_replies,
            tool_rewards=tuple(tool_rewards),
            turn_scores=tuple(turn_scores),
            server_ids=self._server_ids,
        )

    def _turn_sampling(self, num_sampled: int) -> Sampling:
        """Sampling parameters of the next turn, of which so many tokens were sampled. The first turn keeps the sample's
        seed, unless it is continued: its first random numbers have been used. A prompt that is too long still asks for
        one token, and the engine refuses it."""
        sampling, max_tokens = self.context.sampling, max(1, self._turn_room(num_sampled))
        seed = sampling.seed
        if seed is not None and (self.num_turns or num_sampled):
            seed = (seed + self.num_turns * SEED_STRIDE + num_sampled * CONTINUED_STRIDE) % 2**63
        return replace(sampling, max_tokens=max_tokens, seed=seed)

    def _turn_room(self, num_sampled: int) -> int:
        limit = self.context.config.max_turn_tokens
        return self.room if limit is None else min(self.room, limit - num_sampled)

    def _append_segment(self, start: int, end: int, policy_version: int) -> None:
        """Add a segment, or extend the last one if it has the same version. Does nothing for an empty range."""
        if start == end:
            return
        if self._segments and self._segments[-1].policy_version == policy_version:
            start = self._segments.pop().start
        self._segments.append(VersionSegment(start, end, policy_version))
