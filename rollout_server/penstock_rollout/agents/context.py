"""What an agent loop is given."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.agents import AgentsConfig
from penstock.trajectory import Prompt, Sampling
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.tool_calls import ToolCallParser
from penstock_rollout.agents.tools import Toolbox
from penstock_rollout.engines.engine import Engine
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.text.tokenization import Tokenization


@dataclass(frozen=True)
class AgentContext:
    """One sample of one prompt."""

    engine: Engine
    tokenization: Tokenization
    request_id: str
    """Unique to the sample; turn t asks the engine as `<request_id>.<t>`."""
    prompt: Prompt
    """`prompt.extra_info` may hold `tools_kwargs`, `need_tools_kwargs` and `interaction_kwargs`, as in verl."""
    prompt_token_ids: tuple[int, ...]
    """The rendered prompt, the same for every sample of the group."""
    sampling: Sampling
    """With this sample's own seed. `max_tokens` is for the whole response, tokens of the environment included."""
    config: AgentsConfig
    max_model_len: int
    """Longest prompt plus response."""
    toolbox: Toolbox
    """The tools this prompt may use; empty for an agent that is not marked with `uses_tools`."""
    parse_calls: ToolCallParser
    """Reads the calls of a turn in the configured format."""
    interactions: Mapping[str, Interaction]
    metrics: RolloutMetrics


AgentLoop = Callable[[AgentContext], Coroutine[Any, Any, Episode]]
"""Makes one sample. Cancelling it must end what it started; `Transcript` and the sessions do."""


def uses_tools(loop: AgentLoop) -> AgentLoop:
    """Mark an agent to which the tools are offered: the chat template shows them to the model in the first prompt."""
    loop.uses_tools = True  # type: ignore[attr-defined]
    return loop
