"""The input of an agent loop: one sample of one prompt, and everything it may use."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.config.agents import AgentsConfig
from penstock.trajectory import Prompt, Sampling, VersionSegment
from penstock_rollout.agents.episode import Episode, SavedSample
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.tool_calls import ToolCallParser
from penstock_rollout.agents.tools import Toolbox
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.tokenization import Tokenization


class Progress(Protocol):
    """What was saved of one sample, and what is saved from now on. `Transcript.continue_saved` uses it."""

    @property
    def server_id(self) -> str:
        """This server."""
        ...

    @property
    def saved(self) -> SavedSample | None:
        """What earlier leases of the prompt saved."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens after which new ones are saved."""
        ...

    def begin(self, request_id: str) -> None:
        """Note that the engine runs this request of the sample."""
        ...

    def stop(self, request_id: str) -> None:
        """Note that the request has ended."""
        ...

    def add(
        self, token_ids: Sequence[int], log_probs: Sequence[float], segments: Sequence[VersionSegment],
        *, is_last: bool = False,
    ) -> None:  # fmt: skip
        """Save what is new of the whole response so far, if it is enough or nothing follows."""
        ...

    def finish(self, episode: Episode) -> None:
        """Save the finished sample."""
        ...


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
    progress: Progress | None = None
    """Where the tokens of an unfinished sample are saved; None if they are not saved."""


AgentLoop = Callable[[AgentContext], Coroutine[Any, Any, Episode]]
"""Generates one sample. When cancelled, it must end what it started. `Transcript` and the sessions do that."""


def uses_tools(loop: AgentLoop) -> AgentLoop:
    """Mark an agent that offers tools: the chat template shows them to the model in the first prompt."""
    loop.uses_tools = True  # type: ignore[attr-defined]
    return loop
