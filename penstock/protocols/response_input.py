"""The input of OpenAI's Responses as messages."""

from __future__ import annotations

from penstock.errors import InvalidInput
from penstock.protocols.bodies import text_of
from penstock.protocols.conversation import Json, Message, ToolCall


def input_messages(given: str | list[Json], instructions: str | None) -> tuple[Message, ...]:
    """Messages of an input. Calls in a row, and texts before and after them, become one message of the assistant."""
    messages = [Message("system", instructions)] if instructions else []
    if isinstance(given, str):
        return (*messages, Message("user", given))
    for number, item in enumerate(given):
        path, kind = f"input[{number}]", item.get("type", "message")
        if kind == "message":
            message = _message(item, path)
            last = messages[-1] if messages else None
            if message.role == "assistant" and last is not None and last.tool_calls:  # text that goes on after a call
                messages[-1] = Message("assistant", last.content + message.content, last.tool_calls)
            else:
                messages.append(message)
        elif kind == "function_call":
            call = ToolCall(_text(item, "call_id", path), _text(item, "name", path), _text(item, "arguments", path))
            last = messages[-1] if messages and messages[-1].role == "assistant" else None
            if last is not None:
                messages[-1] = Message("assistant", last.content, (*last.tool_calls, call))
            else:
                messages.append(Message("assistant", "", (call,)))
        elif kind == "function_call_output":
            output = item.get("output")
            if not isinstance(output, str | list):
                raise InvalidInput(f"{path}.output", "must be text or a list of texts")
            text = text_of(output, f"{path}.output")
            messages.append(Message("tool", text, tool_call_id=_text(item, "call_id", path)))
        else:
            raise InvalidInput(f"{path}.type", f"{kind!r} is not supported; send messages, calls and their outputs")
    return tuple(messages)


def _message(item: Json, path: str) -> Message:
    role, content = _text(item, "role", path), item.get("content")
    if not isinstance(content, str | list):
        raise InvalidInput(f"{path}.content", "must be text or a list of texts")
    return Message("system" if role == "developer" else role, text_of(content, f"{path}.content"))


def _text(item: Json, name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidInput(f"{path}.{name}", "must be text")
    return value
