"""Adapters from verl's tools and interactions to Penstock's.

They go by methods and not by base classes, so they take classes of an installed verl as well as those that were loaded
with the stand-ins.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock_rollout.agents.interactions import Interaction, InteractionAnswer
from penstock_rollout.agents.tools import Tool, ToolAnswer
from penstock_rollout.agents.verl.shapes import OpenAIFunctionToolSchema


def is_verl_tool(loaded: Any) -> bool:
    return isinstance(loaded, type) and _has_methods(loaded, "create", "execute", "calc_reward", "release")


def is_verl_interaction(loaded: Any) -> bool:
    return isinstance(loaded, type) and _has_methods(loaded, "start_interaction", "generate_response")


class VerlTool(Tool):
    """A tool of verl. One instance lives as long as the sample, and its calls get the sample's `agent_data`.

    `create` gets the prompt's `create_kwargs` both ways in which verl has passed them: as arguments, and as one
    argument of that name."""

    takes_agent_data = True

    def __init__(self, tool: Any, config: dict[str, Any]) -> None:
        super().__init__(config, _plain_schema(tool))
        self._tool = tool
        self._ids: dict[str, str] = {}
        """The ids that `create` returned, by sample. A tool may choose its own."""

    @classmethod
    def load(cls, loaded: type, config: dict[str, Any], schema: dict[str, Any] | None) -> VerlTool:
        given = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        return cls(loaded(config=config, tool_schema=given), config)

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self._ids[instance_id] = instance_id
        created = await _call(self._tool.create, instance_id, create_kwargs=kwargs, **kwargs)
        own_id = created[0] if isinstance(created, tuple) else created
        if isinstance(own_id, str):
            self._ids[instance_id] = own_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolAnswer:
        answer = await _call(self._tool.execute, self._ids[instance_id], parameters, **kwargs)
        if not (isinstance(answer, tuple) and len(answer) == 3):
            raise TypeError(f"{self.name} must return (ToolResponse, reward, metrics)")
        response, reward, metrics = answer
        return _text(response), 0.0 if reward is None else float(reward), _finite_numbers(metrics or {})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        reward = await _call(self._tool.calc_reward, self._ids[instance_id], **kwargs)
        return float(reward) if isinstance(reward, int | float) else None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await _call(self._tool.release, self._ids.pop(instance_id, instance_id), **kwargs)


class VerlInteraction(Interaction):
    """An interaction of verl. `calculate_score` is left to the interaction itself, which calls it for each turn."""

    def __init__(self, interaction: Any, name: str, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._interaction = interaction
        self._name = name

    @classmethod
    def load(cls, loaded: type, name: str, config: dict[str, Any]) -> VerlInteraction:
        return cls(loaded(config={**config, "name": name}), name, config)

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await _call(self._interaction.start_interaction, instance_id, name=self._name, **kwargs)

    async def generate_response(
        self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> InteractionAnswer:
        listed = [dict(message) for message in messages]
        answer = await _call(self._interaction.generate_response, instance_id, listed, name=self._name, **kwargs)
        if not (isinstance(answer, tuple) and len(answer) == 4):
            raise TypeError("generate_response must return (should_terminate, response, score, metadata)")
        done, response, score, extra = answer
        return bool(done), str(response or ""), 0.0 if score is None else float(score), dict(extra or {})

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if _has_methods(type(self._interaction), "finalize_interaction"):
            await _call(self._interaction.finalize_interaction, instance_id, **kwargs)


async def _call(method: Callable[..., Any], *arguments: Any, **kwargs: Any) -> Any:
    """Call a method with as many of the arguments as it takes. Some methods take no `instance_id`, others no kwargs."""
    parameters = inspect.signature(method).parameters.values()
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        arguments = arguments[: len(positional)]
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        taken = {one.name for one in parameters} - {one.name for one in positional[: len(arguments)]}
        kwargs = {name: value for name, value in kwargs.items() if name in taken}
    return await method(*arguments, **kwargs)


def _has_methods(loaded: type, *names: str) -> bool:
    return all(callable(getattr(loaded, name, None)) for name in names)


def _plain_schema(tool: Any) -> dict[str, Any]:
    """The schema that the tool has, which may be its own, as a chat template takes it."""
    schema = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
    plain: dict[str, Any] = (
        schema if isinstance(schema, dict) else schema.model_dump(exclude_unset=True, exclude_none=True)
    )
    return plain


def _text(response: Any) -> str:
    """The text of a ToolResponse. Images and videos cannot be shown to the model and fail the call."""
    if isinstance(response, str):
        return response
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise TypeError("the tool returned an image or a video, and only text can be shown to the model")
    return str(getattr(response, "text", None) or "")


def _finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers. verl's tools also report texts, which cannot be recorded."""
    numbers = {str(key): value for key, value in metrics.items() if isinstance(value, int | float)}
    return {key: float(value) for key, value in numbers.items() if math.isfinite(value)}
