"""Runs the tools of one sample: creates and releases instances, applies deadlines, and turns errors into results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.reward_bounds import is_reward
from penstock_rollout.agents.context import AgentContext
from penstock_rollout.agents.tool_calls import MalformedCall, ToolCall
from penstock_rollout.agents.tools import ToolAnswer, ToolError, tools_kwargs


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


class ToolSession:
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

    async def __aenter__(self) -> ToolSession:
        return self

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
        timeout_s = self._timeout_s(name)
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

    def _timeout_s(self, name: str) -> float:
        own = self._tools[name].timeout_s
        return self._config.tool_timeouts_s.get(name, self._config.tool_timeout_s if own is None else own)

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
