"""The agents of a rollout server: agent loops by name, and the tools and interactions they share."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.config.rollout import AgentsConfig, PythonTool
from penstock.errors import ConfigError, InvalidInput, PoisonGroup
from penstock.trajectory import SESSION_AGENT, Prompt
from penstock.user_code import hint_for_name, load_object
from penstock_rollout.agents.builtin_tools import ProgramTool, RetrievalTool
from penstock_rollout.agents.context import AgentLoop
from penstock_rollout.agents.declarations import load_interactions, load_tools
from penstock_rollout.agents.interactions import Interaction
from penstock_rollout.agents.loops import interaction_agent, single_turn_agent, tool_agent
from penstock_rollout.agents.mcp import McpConnection, open_tools
from penstock_rollout.agents.tool_calls import ToolCallParser, find_parser
from penstock_rollout.agents.tools import Tool, Toolbox
from penstock_rollout.tokenization import Tokenization

logger = logging.getLogger(__name__)
CLOSE_S = 30.0
"""How long one tool may take to close."""

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
    tokenization: Tokenization
    mcp_servers: tuple[McpConnection, ...] = ()

    @classmethod
    def load(cls, config: AgentsConfig, max_model_len: int, tokenization: Tokenization) -> Agents:
        toolbox = load_tools(config.tools_file) if config.tools_file else Toolbox()
        for name, chosen in config.tools.items():
            tool = ProgramTool(name, chosen) if isinstance(chosen, PythonTool) else RetrievalTool(name, chosen)
            toolbox.add(tool, f"rollout.agents.tools.{name}")
        agents = cls(
            config=config,
            max_model_len=max_model_len,
            loops=BUILT_IN | _custom_loops(config.custom),
            toolbox=toolbox,
            interactions=load_interactions(config.interactions_file) if config.interactions_file else {},
            parse_calls=find_parser(config.tool_format),
            tokenization=tokenization,
            mcp_servers=tuple(
                McpConnection(name, server, f"rollout.agents.mcp_servers.{name}")
                for name, server in config.mcp_servers.items()
            ),
        )
        try:
            agents.find("")
        except InvalidInput as error:
            raise ConfigError(f"rollout.agents.default_agent: {error.message}") from error
        agents._check_template()
        return agents

    async def open(self) -> None:
        """Prepare the tools, before the first sample. Raises ConfigError if one cannot work here."""
        for tool in self.toolbox.tools.values():
            await tool.open()
        for server in self.mcp_servers:
            for remote in await open_tools(server):
                self.toolbox.add(remote, server.place)
        if self.mcp_servers:
            self._check_template()

    async def close(self) -> None:
        """Free what the tools hold. A tool that fails does not keep the others from closing."""
        everything: list[Tool | McpConnection] = [*self.toolbox.tools.values(), *self.mcp_servers]
        for opened in everything:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await opened.close()
            except Exception as error:
                logger.warning("%s did not close: %r", opened.name, error)

    def find(self, name: str) -> AgentLoop:
        """The agent of a prompt's `agent_name`. An empty name is the default agent's."""
        if name == SESSION_AGENT:
            raise PoisonGroup("session", "it was sampled in a session, and only its harness could sample it again")
        name = self.name_of(name)
        if name in self.loops:
            return self.loops[name]
        raise InvalidInput("agent_name", f"unknown agent {name!r}; {hint_for_name(name, self.loops)}")

    def name_of(self, agent_name: str) -> str:
        return agent_name or self.config.default_agent

    def toolbox_for(self, prompt: Prompt) -> Toolbox:
        """The tools that the prompt's agent offers to the model. Empty unless the agent uses tools."""
        if not getattr(self.find(prompt.agent_name), "uses_tools", False):
            return Toolbox()
        return self.toolbox.offered(prompt.extra_info)

    def _check_template(self) -> None:
        """Raise ConfigError if the chat template cannot render the messages that agents insert."""
        tokenization = self.tokenization
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
