"""The agents of a rollout server: the built-in agent loops, and all loops by name with the tools and interactions they
share.

A built-in loop gives one response, or has a conversation in which the model calls tools, an interaction replies to it,
or both. `ToolSession` runs the tools of one sample: it creates and releases instances, applies deadlines, and turns
errors into results.

| the model's turn           | what happens                                      | finish reason, if the sample ends |
|----------------------------|---------------------------------------------------|-----------------------------------|
| calls tools                | all calls run at once, their results are inserted | `length`, at the last turn        |
| no call, no interaction    | the sample ends                                   | that of the turn                  |
| no call, an interaction    | it scores the turn, and its reply is inserted     | that of the turn, when it is done |
| the reply does not fit     | nothing is inserted, the sample ends              | `length`                          |

Tool calls in a turn that a token limit cut are ignored, because the last one may be incomplete.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.config.rollout import AgentsConfig, PythonTool
from penstock.errors import ConfigError, InvalidInput, PoisonGroup
from penstock.reward_bounds import is_reward
from penstock.trajectory import SESSION_AGENT, FinishReason, Prompt
from penstock.user_code import hint_for_name, load_object
from penstock_rollout.agents.builtin_tools import ProgramTool, RetrievalTool
from penstock_rollout.agents.declarations import load_interactions, load_tools
from penstock_rollout.agents.episode import Episode
from penstock_rollout.agents.interactions import Interaction, InteractionSession
from penstock_rollout.agents.mcp import McpConnection
from penstock_rollout.agents.tool_calls import MalformedCall, ToolCall, ToolCallParser, find_parser
from penstock_rollout.agents.tools import SET_TOOLS, Tool, ToolAnswer, ToolError, tools_kwargs
from penstock_rollout.agents.transcript import AgentContext, AgentLoop, Toolbox, Transcript, Turn, uses_tools
from penstock_rollout.tokenization import Tokenization


@dataclass
class AgentData:
    request_id: str
    messages: list[dict[str, Any]]
    """The conversation so far, with the assistant's turns as text."""
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    interaction_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_rewards: list[float] = field(default_factory=list)
    """One reward per executed tool call."""
    turn_scores: list[float] = field(default_factory=list)
    """One score per reply of the interaction."""
    user_turns: int = 0
    """Replies to the model: the results of the calls of a turn are one, and so is a reply of the interaction."""
    assistant_turns: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Tools may keep data of the sample here."""
    image_data: None = None
    video_data: None = None


logger = logging.getLogger(__name__)
_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "penstock_probe", "description": "Probes.", "parameters": {"type": "object", "properties": {}},
    },
}  # fmt: skip
"""Rendered to see whether the model is shown its tools."""

Result = Literal["ok", "error", "timeout", "unknown", "malformed", "refused"]
NO_TOOL = "none"
"""Metric label of calls that reach no tool. A name that the model made up must not become a label."""


@dataclass(frozen=True)
class ToolOutcome:
    """Result of one call. The model reads `text`."""

    name: str
    text: str
    reward: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)


class ToolFailure(Exception):
    """A failed call. The model reads the message, with `Error: ` in front."""

    def __init__(self, result: Result, message: str) -> None:
        super().__init__(message)
        self.result = result


class ToolSession(AbstractAsyncContextManager["ToolSession"]):
    """The tools of one sample. Failures of a tool are counted and shown to the model; they are never raised."""

    def __init__(self, context: AgentContext, agent_data: AgentData | None = None) -> None:
        """`agent_data` is the state of the sample, for tools that take it."""
        self._agent_data = agent_data or AgentData(context.request_id, [*context.prompt.chat])
        self._tools = context.toolbox.tools
        self._config = context.config
        self._metrics = context.metrics
        self._instance_id = context.request_id
        self._kwargs = tools_kwargs(context.prompt.extra_info)
        self._begun: set[str] = set()
        """Tools whose `create` was called. Their `release` must be called too."""
        self._ready: set[str] = set()
        """Tools whose `create` succeeded."""

    async def __aexit__(self, *raised: object) -> None:
        """Release every instance, even after an error or a cancellation."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._begun:
                tasks.create_task(self._try_call(name, "release"))

    async def run(self, calls: Sequence[ToolCall | MalformedCall]) -> list[ToolOutcome]:
        """Run the calls of one turn at the same time, and return the outcomes in the order of the calls."""
        limit = self._config.max_calls_per_turn
        names = {call.name for call in calls[:limit] if isinstance(call, ToolCall) and call.name in self._tools}
        failed = dict(zip(names, await asyncio.gather(*(self._create(name) for name in names)), strict=True))
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._answer(call, is_refused=index >= limit, failed=failed))
                for index, call in enumerate(calls)
            ]
        return [task.result() for task in running]

    async def final_reward(self) -> float | None:
        """Sum of the instances' `calc_reward`, or None if none of them gives a reward."""
        given = [await self._try_call(name, "calc_reward") for name in sorted(self._ready)]
        rewards = [reward for reward in given if reward is not None]
        return sum(rewards) if rewards else None

    async def _answer(
        self, call: ToolCall | MalformedCall, is_refused: bool, failed: dict[str, ToolFailure | None]
    ) -> ToolOutcome:
        name = call.name if isinstance(call, ToolCall) else ""
        result: Result = "ok"
        try:
            if is_refused:
                raise ToolFailure("refused", f"at most {self._config.max_calls_per_turn} calls are run per turn")
            text, reward, numbers = await self._execute(call, failed)
        except ToolFailure as failure:
            result, text, reward, numbers = failure.result, f"Error: {failure}", 0.0, {}
        self._metrics.tool_calls.labels(name if name in self._tools else NO_TOOL, result).inc()
        return ToolOutcome(name, self._cut(text), reward, {f"{name}/{key}": value for key, value in numbers.items()})

    async def _execute(self, call: ToolCall | MalformedCall, failed: dict[str, ToolFailure | None]) -> ToolAnswer:
        if isinstance(call, MalformedCall):
            raise ToolFailure("malformed", f"the tool call could not be read: {call.why}")
        if call.name not in self._tools:
            raise ToolFailure("unknown", f"there is no tool {call.name!r}; tools: {', '.join(self._tools)}")
        if failure := failed[call.name]:
            raise failure
        with self._metrics.tool_seconds.time():
            return _checked(call.name, await self._call(call.name, "execute", call.arguments))

    async def _create(self, name: str) -> ToolFailure | None:
        if name in self._ready:
            return None
        self._begun.add(name)
        try:
            await self._call(name, "create")
        except ToolFailure as failure:
            return failure
        self._ready.add(name)
        return None

    async def _try_call(self, name: str, method: Literal["calc_reward", "release"]) -> float | None:
        """Call a method whose result the model does not see. Returns the reward, or None. A failure is only counted."""
        try:
            given = await self._call(name, method)
            return None if given is None or method == "release" else _finite(given)
        except ToolFailure as failure:
            self._metrics.tool_calls.labels(name, failure.result).inc()
            logger.warning("%s of tool %s failed: %s", method, name, failure)
            return None

    async def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a method of a tool. Exceptions and missed deadlines become ToolFailure."""
        tool = self._tools[name]
        timeout_s = self._config.tool_timeout_s if tool.timeout_s is None else tool.timeout_s
        timeout_s = self._config.tool_timeouts_s.get(name, timeout_s)
        kwargs = self._kwargs.get(name, {}).get(f"{method}_kwargs", {})
        if method == "execute" and tool.takes_agent_data:
            kwargs = {**kwargs, "agent_data": self._agent_data}
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await getattr(tool, method)(self._instance_id, *arguments, **kwargs)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ToolFailure("error", f"{name} was cancelled from within") from error
        except ToolError as error:
            raise ToolFailure("error", str(error)) from error
        except Exception as error:
            if deadline.expired():
                raise ToolFailure("timeout", f"{name} did not answer within {timeout_s:g} s") from error
            raise ToolFailure("error", f"{type(error).__name__}: {error}") from error

    def _cut(self, text: str) -> str:
        limit, keep = self._config.max_tool_response_chars, self._config.tool_response_keep
        if len(text) <= limit:
            return text
        if keep == "head":
            return f"{text[:limit]}...(truncated)"
        if keep == "tail":
            return f"(truncated)...{text[-limit:]}"
        return f"{text[: (limit + 1) // 2]}...(truncated)...{text[len(text) - limit // 2 :]}"


def _checked(name: str, answer: Any) -> ToolAnswer:
    """Check the return value of a tool: text, or (text, reward, numbers)."""
    if isinstance(answer, str):
        return answer, 0.0, {}
    if isinstance(answer, tuple) and len(answer) == 3:
        text, reward, numbers = answer
        if isinstance(text, str) and isinstance(numbers, dict | None):
            return text, _finite(reward), {str(key): _finite(value) for key, value in (numbers or {}).items()}
    logger.error("tool %s returned %s; it must return text or (text, reward, numbers)", name, type(answer).__name__)
    raise ToolFailure("error", f"{name} gave no readable answer")


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ToolFailure("error", f"a tool gave {value!r} as a number") from error
    if not is_reward(number):
        raise ToolFailure("error", f"a tool gave the number {number:g}")
    return number


@uses_tools
async def tool_agent(context: AgentContext) -> Episode:
    """Offer the tools to the model. With `interaction_kwargs` in the prompt, an interaction replies to other turns."""
    if not context.toolbox.tools:
        raise InvalidInput("agent_name", f"tool_agent has no tools to offer; {SET_TOOLS}")
    return await _Conversation(context, _interaction_kwargs(context)).run()


async def interaction_agent(context: AgentContext) -> Episode:
    """Offer no tools. The interaction that `interaction_kwargs` names replies to every turn."""
    return await _Conversation(context, _interaction_kwargs(context) or {}).run()


class _Conversation:
    """One sample. Tools and interactions read `data`; the sample's tokens come only from the transcript."""

    def __init__(self, context: AgentContext, interaction_kwargs: dict[str, Any] | None) -> None:
        self.context = context
        self.transcript = Transcript(context)
        self.data = AgentData(
            request_id=context.request_id,
            messages=[*context.prompt.chat],
            tools_kwargs=tools_kwargs(context.prompt.extra_info),
            interaction_kwargs=interaction_kwargs or {},
        )
        self.tools = ToolSession(context, self.data)
        self.interaction: InteractionSession | None = None
        if interaction_kwargs is not None:
            limit_s = context.config.tool_timeout_s
            self.interaction = InteractionSession(context.interactions, context.request_id, interaction_kwargs, limit_s)
        self.turn_rewards: list[float] = []
        self.numbers: dict[str, float] = {}

    async def run(self) -> Episode:
        async with self.tools, self.interaction or nullcontext():
            finish_reason = await self._turns()
            final_reward = None if finish_reason == "aborted" else await self._final_reward()
        return self.transcript.episode(
            finish_reason,
            turn_rewards=self.turn_rewards,
            final_reward=final_reward,
            reward_parts=self.numbers,
            tool_rewards=self.data.tool_rewards,
            turn_scores=self.data.turn_scores,
        )

    async def _turns(self) -> FinishReason:
        while True:
            turn = await self.transcript.sample_turn()
            if turn.finish_reason == "aborted":
                return "aborted"
            self.data.assistant_turns += 1
            most_replies = self.context.config.max_user_turns
            is_answered_enough = most_replies is not None and self.data.user_turns >= most_replies
            is_last = is_answered_enough or self.transcript.num_turns >= self.context.config.max_turns
            answer = await self._answer(turn, is_last)
            if answer is None:
                return turn.finish_reason
            if is_last or not self.transcript.insert(answer):
                return "length"
            self.data.messages += answer
            self.data.user_turns += 1

    async def _answer(self, turn: Turn, is_last: bool) -> list[dict[str, Any]] | None:
        """The messages that reply to a turn, or None to end the sample. Appends the reward of the turn."""
        tokenization = self.context.tokenization
        self.data.messages.append({"role": "assistant", "content": tokenization.text(turn.token_ids)})
        calls: list[ToolCall | MalformedCall] = []
        if self.context.toolbox.tools and turn.finish_reason == "stop":
            calls = self.context.parse_calls(tokenization.raw_text(turn.token_ids))
        if calls:
            return await self._tool_messages([] if is_last else calls)
        if self.interaction is None:
            self.turn_rewards.append(0.0)
            return None
        done, feedback, reward, numbers = await self.interaction.respond(self.data.messages)
        self.turn_rewards.append(reward)
        self.data.turn_scores.append(reward)
        self._record(numbers)
        return None if done else [{"role": "user", "content": feedback}]

    async def _tool_messages(self, calls: list[ToolCall | MalformedCall]) -> list[dict[str, Any]]:
        outcomes = await self.tools.run(calls)
        self.turn_rewards.append(sum(outcome.reward for outcome in outcomes))
        self.data.tool_rewards += [outcome.reward for outcome in outcomes]
        for outcome in outcomes:
            self._record(outcome.numbers)
        turn = self.transcript.num_turns - 1
        return [
            {"role": "tool", "name": outcome.name, "tool_call_id": f"call_{turn}_{index}", "content": outcome.text}
            for index, outcome in enumerate(outcomes)
        ]

    async def _final_reward(self) -> float | None:
        given = [await self.tools.final_reward(), await self.interaction.final_reward() if self.interaction else None]
        rewards = [reward for reward in given if reward is not None]
        return sum(rewards) if rewards else None

    def _record(self, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self.numbers[name] = self.numbers.get(name, 0.0) + value


def _interaction_kwargs(context: AgentContext) -> dict[str, Any] | None:
    """The prompt's `interaction_kwargs`, or None. Parquet writes null for rows without the field."""
    kwargs = context.prompt.extra_info.get("interaction_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise InvalidInput("extra_info.interaction_kwargs", "must be an object with the interaction's `name`")
    return kwargs


async def single_turn_agent(context: AgentContext) -> Episode:
    """Generate one response, or continue the one that another server began. The model samples every token, so all of
    them are trained."""
    transcript = Transcript(context)
    transcript.continue_saved()
    turn = await transcript.sample_turn()
    return transcript.episode(turn.finish_reason)


# ── all loops by name ──

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
            for remote in await server.open():
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
        """Raise ConfigError if the chat template cannot render the messages that agents insert, or the tools."""
        has_tools = bool(self.toolbox.tools or self.mcp_servers)
        schemas = [*self.toolbox.schemas, _PROBE] if has_tools else []
        roles = [*(["tool"] if has_tools else []), *(["user"] if self.interactions else [])]
        try:
            for role in roles:
                self.tokenization.next_ids(0, [{"role": role, "content": "0", "name": "0"}], schemas)
        except InvalidInput as error:
            raise ConfigError(f"model.path: the chat template cannot render a {role} message: {error}") from error
        if not has_tools or self.config.show_tools == "own":
            return
        text = why = ""
        try:
            text = self.tokenization.first_text([{"role": "user", "content": "0"}], schemas)
        except InvalidInput as error:
            why = f" ({error})"
        if _PROBE["function"]["name"] not in text:
            hidden, ways = "tools", "prompt, or to own if your prompts describe them"
            if self.config.show_tools == "prompt":
                hidden, ways = "a system message", "own, and describe the tools in your prompts"
            hidden = f"the chat template does not show the model {hidden}{why}"
            raise ConfigError(f"model.path: {hidden}; set rollout.agents.show_tools to {ways}")


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
