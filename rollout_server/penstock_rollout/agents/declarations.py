"""Tools and interactions that YAML files declare, in verl's format, and classes that were written for verl, which run
without importing it. Error messages have one line.

A class may be Penstock's or one written for verl. For the tools and the interaction that verl ships, others take their
place: verl's own classes need Ray, and the one for programs needs a service. A key of their `config` is used or
refused.

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
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar
from uuid import uuid4

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from penstock.config.base import Config
from penstock.config.loading import explain
from penstock.config.rollout import PythonTool, SearchTool
from penstock.errors import ConfigError, one_line
from penstock.user_code import load_object
from penstock_rollout.agents.builtin_tools import ProgramTool, RetrievalTool
from penstock_rollout.agents.interactions import Interaction, InteractionAnswer, recordable
from penstock_rollout.agents.tools import Tool, ToolAnswer
from penstock_rollout.agents.transcript import Toolbox
from penstock_rollout.rewards.rules import gsm8k

_F = TypeVar("_F", bound=Callable[..., Any])
_M = TypeVar("_M", bound=BaseModel)


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


# ── the files ──

_TOOLS_FILE = "rollout.agents.tools_file"


class ToolDeclaration(Config):
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}
    tool_schema: OpenAIFunctionToolSchema | None = None
    """None for a tool of verl that has its own schema."""
    mcp: Any = None
    """verl's block of MCP servers, which is refused."""


class InteractionDeclaration(Config):
    name: str | None = Field(default=None, min_length=1)
    """None for the name of the class without `Interaction`, in lower case, as in verl."""
    class_name: str = Field(min_length=1)
    config: dict[str, Any] = {}


class ToolsFile(Config):
    tools: list[ToolDeclaration] = Field(min_length=1)


class InteractionsFile(Config):
    interaction: list[InteractionDeclaration] = Field(min_length=1)


def read_declarations(path: Path, kind: type[_M], where: str) -> _M:
    """Read and check a file. `where` is the config field that names it, for error messages."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{where} {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} {path} is not YAML: {one_line(error)}") from error
    return _validated(kind, data, f"{where} {path}")


class _Limits(Config):
    type: Literal["native"] = "native"
    num_workers: int = Field(ge=1)
    rate_limit: int = Field(ge=1)
    """In verl a number of calls at the same time, over all workers. Here it is one of each rollout server."""
    enable_global_rate_limit: bool = True

    @property
    def num_concurrent(self) -> int:
        return min(self.num_workers, self.rate_limit) if self.enable_global_rate_limit else self.num_workers


class _SearchConfig(_Limits):
    """`config` of verl's SearchTool, with verl's defaults."""

    retrieval_service_url: str = Field(pattern=r"^https?://")
    topk: int = Field(default=3, ge=1)
    timeout: float = Field(default=30.0, gt=0)
    num_workers: int = Field(default=120, ge=1)
    rate_limit: int = Field(default=120, ge=1)

    def tool(self, name: str) -> Tool:
        settings = SearchTool(
            kind="search", url=self.retrieval_service_url, top_k=self.topk, timeout_s=self.timeout,
            max_concurrent=self.num_concurrent,
        )  # fmt: skip
        return RetrievalTool(name, settings)


class _SandboxConfig(_Limits):
    """`config` of verl's SandboxFusionTool, with verl's defaults. Its service is not called: a URL is refused."""

    default_timeout: float = Field(default=30.0, gt=0)
    default_language: Literal["python"] = "python"
    memory_limit_mb: int = Field(default=1024, ge=64)
    num_workers: int = Field(default=10, ge=1)
    rate_limit: int = Field(default=10, ge=1)

    def tool(self, name: str) -> Tool:
        settings = PythonTool(
            kind="python", timeout_s=self.default_timeout, memory_bytes=self.memory_limit_mb * 2**20,
            num_processes=self.num_concurrent,
        )  # fmt: skip
        return ProgramTool(name, settings)


_CONFIGS: dict[str, type[_SearchConfig] | type[_SandboxConfig]] = {
    "verl.tools.search_tool.SearchTool": _SearchConfig,
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": _SandboxConfig,
}


def _dotted(class_name: str) -> str:
    return class_name.replace(":", ".")


def _validated(kind: type[_M], data: Any, where: str) -> _M:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{where}: {mistake.line}" for mistake in explain(error, kind))) from error


def load_tools(path: Path) -> Toolbox:
    toolbox = Toolbox()
    for index, declared in enumerate(read_declarations(path, ToolsFile, _TOOLS_FILE).tools):
        place = f"{_TOOLS_FILE} {path}: tools.{index}"
        if declared.mcp is not None or declared.config.get("type") == "mcp":
            raise ConfigError(
                f"{place}: MCP servers are not declared in this file; write them into the config, as "
                "`rollout.agents.mcp_servers: {NAME: {command: [PROGRAM, ARGUMENT]}}` or `{NAME: {url: ADDRESS}}`"
            )
        toolbox.add(_tool(declared, place), place)
    return toolbox


def load_interactions(path: Path) -> dict[str, Interaction]:
    where = "rollout.agents.interactions_file"
    interactions: dict[str, Interaction] = {}
    for index, declared in enumerate(read_declarations(path, InteractionsFile, where).interaction):
        place = f"{where} {path}: interaction.{index}"
        class_name = _dotted(declared.class_name).rpartition(".")[2]
        name = declared.name or (class_name.removesuffix("Interaction") or class_name).lower()
        if name in interactions:
            raise ConfigError(f"{place}: an interaction {name!r} was declared already; give it another name")
        interactions[name] = _interaction(declared.class_name, name, declared.config, place)
    return interactions


def _tool(declared: ToolDeclaration, place: str) -> Tool:
    built_in = _CONFIGS.get(_dotted(declared.class_name))
    schema: dict[str, Any] | None = None
    if declared.tool_schema is not None:  # as written in the file: keys that were omitted stay out
        schema = {"type": "function"} | declared.tool_schema.model_dump(exclude_unset=True)
    loaded = None if built_in else _class(declared.class_name, Tool, TOOL_METHODS, "verl's BaseTool", place)
    is_verl = loaded is not None and not issubclass(loaded, Tool)
    if schema is None and not is_verl:
        raise ConfigError(f"{place}.tool_schema is missing; describe the function that the model calls")
    if built_in is not None and schema is not None:
        given: _SearchConfig | _SandboxConfig = _validated(built_in, declared.config, f"{place}.config")
        tool = given.tool(schema["function"]["name"])
        tool.tool_schema = schema
        return tool
    assert loaded is not None
    try:
        return VerlTool(loaded, declared.config, schema) if is_verl else loaded(declared.config, schema)
    except Exception as error:
        raise ConfigError(f"{place}.class_name: {declared.class_name} cannot be created: {error!r}") from error


def _interaction(class_name: str, name: str, config: dict[str, Any], place: str) -> Interaction:
    loaded = _class(class_name, Interaction, INTERACTION_METHODS, "verl's BaseInteraction", place)
    try:
        return loaded(config) if issubclass(loaded, Interaction) else VerlInteraction(loaded, name, config)
    except Exception as error:
        raise ConfigError(f"{place}: {class_name} cannot be created: {error!r}") from error


def _class(class_name: str, own: type, methods: Sequence[str], of_verl: str, place: str) -> Any:
    """The class, which is a subclass of `own` or has verl's `methods`."""
    with verl_names():
        loaded: Any = SHIPPED.get(_dotted(class_name)) or load_object(class_name, f"{place}.class_name")
    if not (isinstance(loaded, type) and issubclass(loaded, own)) and not has_methods(loaded, *methods):
        raise ConfigError(
            f"{place}.class_name: {class_name} is not a subclass of {own.__module__}.{own.__name__}, nor has it the "
            f"methods of {of_verl}"
        )
    return loaded
