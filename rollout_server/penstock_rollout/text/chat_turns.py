"""Finds the tokens that a chat template puts between two assistant turns.

The ids that the model sampled are never rendered or encoded again. The template renders a fixed conversation instead,
`[user, assistant, *messages]`, in which the assistant says a marker. The text after the marker is encoded and appended.
For example, for a Qwen template and one tool message the text is

    <|im_end|>\\n<|im_start|>user\\n<tool_response>\\n…\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

It starts with the end-of-turn token of the assistant's message. A turn that was cut by a limit needs this token. A turn
whose last sampled id is a stop token has ended already, so the text up to and including the template's end-of-turn
token is left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import ConfigError, InvalidInput

Message = Mapping[str, Any]
"""`role`, `content`, and further fields that the template reads (`name`, `tool_call_id`)."""

_SPOKEN = "PENSTOCK_SPOKEN"
_NEXT = "PENSTOCK_NEXT"
_BASE: tuple[Message, ...] = ({"role": "user", "content": "0"}, {"role": "assistant", "content": _SPOKEN})


class ChatTurns:
    """The turn boundaries of one tokenizer's chat template."""

    def __init__(
        self, tokenizer: Any, stop_ids: frozenset[int], template_arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template_arguments = dict(template_arguments or {})
        self._stop_ids = stop_ids
        self._closing: dict[str, bool] = {}

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """Encode a whole conversation, with the tools that it may call, up to the start of the model's next turn.

        `template_arguments` win over those of the run's config."""
        return self._encode(self._render(messages, tools, template_arguments))

    def next_ids(
        self, last_sampled: int, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """The ids between a turn that ended with `last_sampled` and the next turn, with `messages` between them."""
        before, after = self._split(messages, tools, template_arguments)
        whole, prefix = self._encode(before + after), self._encode(before)
        # A tokenizer may merge across the boundary. Then the appended part is encoded by itself.
        ids = whole[len(prefix) :] if whole[: len(prefix)] == prefix else self._encode(after)
        if last_sampled in self._stop_ids and self._closes(str(messages[0]["role"]), tools):
            return ids[next(index for index, token in enumerate(ids) if token in self._stop_ids) + 1 :]
        return ids

    def _closes(self, role: str, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template ends an assistant turn with a stop token before a message of `role`."""
        if role not in self._closing:
            _, after = self._split([{"role": role, "content": _NEXT, "name": _NEXT}], tools)
            self._closing[role] = not self._stop_ids.isdisjoint(self._encode(after.partition(_NEXT)[0]))
        return self._closing[role]

    def _split(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, str]:  # fmt: skip
        """The rendered fixed conversation, split after the marker."""
        text = self._render([*_BASE, *messages], tools, template_arguments)
        before, marker, after = text.partition(_SPOKEN)
        if not marker:
            raise ConfigError(
                "the model's chat template leaves out the assistant's messages, which multi-turn agents need"
            )
        return before + marker, after

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_with_argument_objects(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                **{**self._template_arguments, **(template_arguments or {})},
            )
        except Exception as error:  # a template is code that comes with the model
            why = " ".join(str(error).split())
            raise InvalidInput("messages", f"the model's chat template cannot render them: {why}") from error
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _with_argument_objects(message: Message) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects. OpenAI's API has them as JSON text, and templates
    would quote that once more."""
    plain = dict(message)
    if not isinstance(plain.get("tool_calls"), list):
        return plain
    calls = []
    for call in plain["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            with contextlib.suppress(ValueError, RecursionError):
                call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}  # noqa: PLW2901
        calls.append(call)
    return {**plain, "tool_calls": calls}
