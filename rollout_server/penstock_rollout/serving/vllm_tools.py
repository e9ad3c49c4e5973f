"""vLLM's own tool parsers, by their names. vLLM is imported when the first request with tools comes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from penstock.protocols.conversation import Conversation
from penstock.v1 import generate_pb2
from penstock_rollout.serving.tool_call_reader import ReadText, new_call_id

_CHOICES = {
    generate_pb2.TOOL_CHOICE_UNSPECIFIED: "auto",
    generate_pb2.TOOL_CHOICE_NONE: "none",
    generate_pb2.TOOL_CHOICE_REQUIRED: "required",
}


def parser_names() -> list[str]:
    from vllm.tool_parsers import ToolParserManager

    names: list[str] = ToolParserManager.list_registered()
    return names


class VllmToolReader:
    """Reads one answer with a tool parser of vLLM."""

    def __init__(self, name: str, tokenizer: Any, conversation: Conversation, *, stream: bool) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        kind = ToolParserManager.get_tool_parser(name)
        self._request = ChatCompletionRequest(
            model="", messages=[], tools=list(conversation.tools), tool_choice=_tool_choice(conversation),
            parallel_tool_calls=not conversation.single_tool_call,
        )  # fmt: skip
        takes_tools = "tools" in inspect.signature(kind).parameters
        self._parser = kind(tokenizer, self._request.tools) if takes_tools else kind(tokenizer)
        self._stream = stream
        self._text = ""
        self._token_ids: list[int] = []
        self._known: list[str] = []
        """The arguments of each call that were passed on."""

    def add(self, text: str, token_ids: Sequence[int], is_last: bool) -> ReadText:
        before, ids_before = self._text, list(self._token_ids)
        self._text += text
        self._token_ids += token_ids
        if not self._stream:
            return self._whole() if is_last else ReadText()
        read = ReadText()
        if text:
            delta = self._parser.extract_tool_calls_streaming(
                before, self._text, text, ids_before, self._token_ids, list(token_ids), self._request
            )
            if delta is not None:
                read.content = delta.content or ""
                read.tool_calls += [part for call in delta.tool_calls or () if (part := self._part(call)) is not None]
        if is_last and self._known:
            self._add_rest(read)
        return read

    def _whole(self) -> ReadText:
        found = self._parser.extract_tool_calls(self._text, self._request)
        if not found.tools_called:
            return ReadText(self._text)
        parts = [
            generate_pb2.ToolCallPart(
                index=index, call_id=new_call_id(), name=call.function.name, arguments=call.function.arguments
            )
            for index, call in enumerate(found.tool_calls)
        ]
        return ReadText(found.content or "", parts)

    def _part(self, call: Any) -> generate_pb2.ToolCallPart | None:
        function = call.function
        arguments = (function.arguments if function is not None else None) or ""
        if call.index < len(self._known):
            self._known[call.index] += arguments
            return generate_pb2.ToolCallPart(index=call.index, arguments=arguments) if arguments else None
        self._known.append(arguments)
        name = (function.name if function is not None else None) or ""
        return generate_pb2.ToolCallPart(
            index=len(self._known) - 1, call_id=new_call_id(), name=name, arguments=arguments
        )

    def _add_rest(self, read: ReadText) -> None:
        """Add arguments that the parser has read and held back at the end of the answer."""
        rest = getattr(self._parser, "get_remaining_unstreamed_args", lambda: "")()
        if rest:
            read.tool_calls.append(generate_pb2.ToolCallPart(index=len(self._known) - 1, arguments=rest))


def _tool_choice(conversation: Conversation) -> Any:
    if conversation.tool_choice == generate_pb2.TOOL_CHOICE_NAMED:
        return {"type": "function", "function": {"name": conversation.tool_name}}
    return _CHOICES[conversation.tool_choice]
