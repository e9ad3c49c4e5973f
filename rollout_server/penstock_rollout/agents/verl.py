"""Runs tool and interaction classes that were written for verl, without importing verl.

While a user's file is imported on a machine without verl, modules with verl's names stand in for it. They have what
such files import: base classes, schemas and a decorator. Their names and fields are verl's, because the files use them.
The adapters then make Penstock's tools and interactions of the classes. They go by methods and not by base classes, so
they take classes of an installed verl as well.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, field_validator

from penstock_rollout.agents.interactions import Interaction, InteractionAnswer, recordable
from penstock_rollout.agents.tools import Tool, ToolAnswer
from penstock_rollout.rewards.rules import gsm8k

_F = TypeVar("_F", bound=Callable[..., Any])


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Schema):
    type: str | list[str] = "string"
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Schema):
    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = {}
    required: list[str] = []


class OpenAIFunctionSchema(_Schema):
    name: str = Field(min_length=1)
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()
    strict: bool = False


class OpenAIFunctionToolSchema(_Schema):
    """The schema of a tool. A tool of verl gets it as an object, not as a mapping."""

    type: Literal["function"] = "function"
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The result of a call. Images and videos are lists."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _is_a_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError("must be a list; write [image] for a single one")
        return value

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


def rollout_trace_op(function: _F) -> _F:
    """verl's tracing decorator. Calls of tools are traced by the server itself."""
    return function


class BaseTool:
    """Base class of verl's tools."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return None


class BaseInteraction:
    """Base class of verl's interactions. `config` holds the interaction's `name` too."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        raise NotImplementedError

    async def calculate_score(self, *arguments: Any, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *arguments: Any, **kwargs: Any) -> None:
        return None


class Gsm8kTool(BaseTool):
    """Tells the model the score of its answer to a problem of GSM8K. An answer that is not better than the one before
    costs 0.05."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, Any] = {}
        self._scores: dict[str, float] = {}

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any) -> Any:
        assert instance_id is not None
        self._truths[instance_id], self._scores[instance_id] = ground_truth, 0.0
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        answer, before = str(parameters.get("answer", "")), self._scores[instance_id]
        score = self._scores[instance_id] = _gsm8k_score(f"#### {answer}", self._truths[instance_id], "flexible")
        shown = ToolResponse(text=f"Your answer {answer} has the score {score:g}.")
        return shown, -0.05 if score <= before else 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._scores[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id], self._scores[instance_id]


class Gsm8kInteraction(BaseInteraction):
    """Tells the model whether the number after `####` is the answer, until it is."""

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        last = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        score = _gsm8k_score(last, kwargs.get("ground_truth", ""))
        reply = "That is right." if score else "That is not right. Check your steps and answer again."
        return bool(score), reply, score, {}


SHIPPED: dict[str, type] = {
    "verl.tools.gsm8k_tool.Gsm8kTool": Gsm8kTool,
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": Gsm8kInteraction,
}
"""Classes that verl ships, by the names that its files give them."""

_SCHEMAS: dict[str, type[BaseModel]] = {
    **{schema.__name__: schema for schema in _Schema.__subclasses__()},
    "ToolResponse": ToolResponse,
}


@contextlib.contextmanager
def verl_names() -> Iterator[None]:
    """Inside the block, `verl.tools.base_tool` and the other modules of `_modules` can be imported. Does nothing if
    verl is installed, or if another import already has its names. What a file imports later, inside a function, is not
    found."""
    if "verl" in sys.modules or importlib.util.find_spec("verl") is not None:
        yield
        return
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


def _modules() -> dict[str, ModuleType]:
    contents: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.tools": {},
        "verl.tools.schemas": {**_SCHEMAS},
        "verl.tools.base_tool": {"BaseTool": BaseTool, "rollout_trace_op": rollout_trace_op, **_SCHEMAS},
        "verl.tools.gsm8k_tool": {"Gsm8kTool": Gsm8kTool},
        "verl.interactions": {},
        "verl.interactions.base": {"BaseInteraction": BaseInteraction},
        "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": Gsm8kInteraction},
        "verl.utils": {},
        "verl.utils.rollout_trace": {"rollout_trace_op": rollout_trace_op},
        "verl.utils.reward_score": {},
        "verl.utils.reward_score.gsm8k": {"compute_score": _gsm8k_score},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        vars(module).update(contents[name])
        if any(other.startswith(f"{name}.") for other in contents):
            module.__path__ = []  # a package, in which nothing else is found
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


def _gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return gsm8k("", solution_str, ground_truth, {}, method=method, correct_score=score, format_score=format_score)


TOOL_METHODS = ("create", "execute", "calc_reward", "release")
INTERACTION_METHODS = ("start_interaction", "generate_response")
"""The methods by which a class of verl is recognized."""


class VerlTool(Tool):
    """A tool of verl. One instance lives as long as the sample, and its calls get the sample's `agent_data`.

    `create` gets the prompt's `create_kwargs` both ways in which verl has passed them: as arguments, and as one
    argument of that name."""

    takes_agent_data = True

    def __init__(self, loaded: type, config: dict[str, Any], schema: dict[str, Any] | None) -> None:
        given = None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)
        self._tool: Any = loaded(config=config, tool_schema=given)
        super().__init__(config, _plain_schema(self._tool))
        self._ids: dict[str, str] = {}
        """The ids that `create` returned, by sample. A tool may choose its own."""

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
        return _text(response), 0.0 if reward is None else float(reward), recordable(metrics or {})

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        reward = await _call(self._tool.calc_reward, self._ids[instance_id], **kwargs)
        return float(reward) if isinstance(reward, int | float) else None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await _call(self._tool.release, self._ids.pop(instance_id, instance_id), **kwargs)


class VerlInteraction(Interaction):
    """An interaction of verl. `calculate_score` is left to the interaction itself, which calls it for each turn."""

    def __init__(self, loaded: type, name: str, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._interaction: Any = loaded(config={**config, "name": name})
        self._name = name

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
        if has_methods(type(self._interaction), "finalize_interaction"):
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


def has_methods(loaded: Any, *names: str) -> bool:
    return isinstance(loaded, type) and all(callable(getattr(loaded, name, None)) for name in names)


def _plain_schema(tool: Any) -> dict[str, Any]:
    """The schema that the tool has, which may be its own, as a chat template takes it."""
    schema = getattr(tool, "tool_schema", None) or tool.get_openai_tool_schema()
    return schema if isinstance(schema, dict) else dict(schema.model_dump(exclude_unset=True, exclude_none=True))


def _text(response: Any) -> str:
    """The text of a ToolResponse. Images and videos cannot be shown to the model and fail the call."""
    if isinstance(response, str):
        return response
    if getattr(response, "image", None) or getattr(response, "video", None):
        raise TypeError("the tool returned an image or a video, and only text can be shown to the model")
    return str(getattr(response, "text", None) or "")
