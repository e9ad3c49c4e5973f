"""The input of an agent loop: one sample of one prompt, and everything it may use."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.rollout import AgentsConfig
from penstock.trajectory import Prompt, Sampling
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.saved_samples import SampleProgress
from penstock_rollout.agents.tool_calls import ToolCallParser
from penstock_rollout.agents.tools import Toolbox
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.tokenization import Tokenization


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
