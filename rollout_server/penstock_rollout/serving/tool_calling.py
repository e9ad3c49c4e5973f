"""How the tool calls of a server's answers are read and constrained: by vLLM's own parsers, or by our tool formats."""

from __future__ import annotations

from penstock.config.rollout import RolloutConfig
from penstock.errors import ConfigError, InvalidInput
from penstock.protocols.conversation import Conversation
from penstock.user_code import hint_for_name
from penstock.v1 import generate_pb2
from penstock_rollout.agents.tool_calls import TOOL_FORMATS, find_parser
from penstock_rollout.engines.engine import OutputConstraint
from penstock_rollout.serving.output_constraint import SYNTAXES, calls_are_constrained, constraint_of
from penstock_rollout.serving.tool_call_reader import FormatReader, ToolCallReader
from penstock_rollout.serving.vllm_tools import VllmToolReader, parser_names
from penstock_rollout.text.tokenization import Tokenization

SHARED_WITH_VLLM = ("hermes", "llama3_json")
"""Our formats for which vLLM has a parser of the same name. vLLM's `openai` is the format of gpt-oss, ours is not."""


class ToolCalling:
    """The tool parser of one server."""

    def __init__(self, name: str, tokenization: Tokenization, *, is_vllm: bool = False) -> None:
        self.name = name
        self.tokenization = tokenization
        self.is_vllm = is_vllm

    @classmethod
    def of(cls, config: RolloutConfig, engine_name: str, tokenization: Tokenization) -> ToolCalling:
        """The parser that the config names. Raises ConfigError if there is none of this name."""
        name = config.tool_parser or config.agents.tool_format
        has_vllm = engine_name == "vllm"
        if config.tool_parser and config.tool_parser not in TOOL_FORMATS:
            _check_known(config.tool_parser, has_vllm=has_vllm)
        is_vllm = has_vllm and (bool(config.tool_parser) or name in SHARED_WITH_VLLM) and ":" not in name
        return cls(name, tokenization, is_vllm=is_vllm)

    def reader(self, conversation: Conversation, *, stream: bool) -> ToolCallReader:
        if self.is_vllm:
            return VllmToolReader(self.name, self.tokenization.tokenizer, conversation, stream=stream)
        return FormatReader(find_parser(self.name))

    def constraint(self, request: generate_pb2.GenerateRequest, conversation: Conversation) -> OutputConstraint | None:
        """What the request lets an answer be. None: any text."""
        is_of_vllm = self.is_vllm and self.name not in SHARED_WITH_VLLM
        if is_of_vllm and calls_are_constrained(request, conversation):
            raise InvalidInput("tool_choice", f"calls of the tool parser {self.name} cannot be constrained; use auto")
        return constraint_of(request, conversation, None if is_of_vllm else SYNTAXES.get(self.name))


def _check_known(name: str, *, has_vllm: bool) -> None:
    where = "rollout.tool_parser"
    if not has_vllm:
        find_parser(name, where)
        return
    known = parser_names()
    if name not in known and ":" not in name:
        raise ConfigError(f"{where}: vLLM has no tool parser {name!r}; {hint_for_name(name, known)}")
