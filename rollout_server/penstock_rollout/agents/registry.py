"""The agents of a rollout server: agent loops by name, and the tools and interactions they share."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config.agents import AgentsConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.trajectory import Prompt
from penstock_rollout.agents.context import AgentLoop
from penstock_rollout.agents.imports import load_object
from penstock_rollout.agents.interactions import Interaction, load_interactions
from penstock_rollout.agents.single_turn import single_turn_agent
from penstock_rollout.agents.tool_agent import interaction_agent, tool_agent
from penstock_rollout.agents.tool_calls import ToolCallParser, find_parser
from penstock_rollout.agents.tools import Toolbox
from penstock_rollout.text.tokenization import Tokenization

logger = logging.getLogger(__name__)

BUILT_IN: dict[str, AgentLoop] = {
    "single_turn_agent": single_turn_agent,
    "tool_agent": tool_agent,
    "interaction_agent": interaction_agent,
}


@dataclass(frozen=True)
class Agents:
    """Everything that agents use, loaded and checked when the server starts.

    A prompt can only choose one of the loaded agents, because a client must not decide which code is imported."""

    config: AgentsConfig
    max_model_len: int
    loops: Mapping[str, AgentLoop]
    toolbox: Toolbox
    interactions: Mapping[str, Interaction]
    parse_calls: ToolCallParser

    @classmethod
    def load(cls, config: AgentsConfig, max_model_len: int, tokenization: Tokenization) -> Agents:
        agents = cls(
            config=config,
            max_model_len=max_model_len,
            loops=BUILT_IN | _custom_loops(config.custom),
            toolbox=Toolbox.load(config.tools_file) if config.tools_file else Toolbox(),
            interactions=load_interactions(config.interactions_file) if config.interactions_file else {},
            parse_calls=find_parser(config.tool_format),
        )
        agents._check_template(tokenization)
        return agents

    def find(self, name: str) -> AgentLoop:
        if name in self.loops:
            return self.loops[name]
        nearest = difflib.get_close_matches(name, self.loops, n=1)
        hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(self.loops)}"
        raise InvalidInput("agent_name", f"unknown agent {name!r}; {hint}")

    def toolbox_for(self, prompt: Prompt) -> Toolbox:
        """The tools that the prompt's agent offers to the model. Empty unless the agent uses tools."""
        if not getattr(self.find(prompt.agent_name), "uses_tools", False):
            return Toolbox()
        return self.toolbox.offered(prompt.extra_info)

    def _check_template(self, tokenization: Tokenization) -> None:
        """Raise ConfigError if the chat template cannot render the messages that agents insert."""
        roles = [*(["tool"] if self.toolbox.tools else []), *(["user"] if self.interactions else [])]
        try:
            for role in roles:
                tokenization.next_ids(0, [{"role": role, "content": "0", "name": "0"}], self.toolbox.schemas)
        except InvalidInput as error:
            raise ConfigError(f"model.path: the chat template cannot render a {role} message: {error}") from error
        if self.toolbox.tools:
            question = Prompt(messages=(("user", "0"),))
            if tokenization.prompt_ids(question) == tokenization.prompt_ids(question, self.toolbox.schemas):
                logger.warning("the model's chat template does not show tools; describe them in the prompts")


def _custom_loops(paths: Mapping[str, str]) -> dict[str, AgentLoop]:
    loops: dict[str, AgentLoop] = {}
    for name, path in paths.items():
        where = f"rollout.agents.custom.{name}"
        if name in BUILT_IN:
            raise ConfigError(f"{where}: this is the name of a built-in agent; choose another")
        loops[name] = load_object(path, where)
        if not inspect.iscoroutinefunction(loops[name]):
            raise ConfigError(f"{where}: {path} is not an `async def` function; make it one")
    return loops
