"""Encodes prompts and the messages between turns, and decodes responses, with the model's tokenizer.

The ids that the model sampled are never rendered or encoded again. To find the tokens that the chat template puts
between two assistant turns, the template renders a fixed conversation, `[user, assistant, *messages]`, in which the
assistant says a marker. The text after the marker is encoded and appended: for a Qwen template and a tool message

    <|im_end|>\\n<|im_start|>user\\n<tool_response>\\n…\\n</tool_response><|im_end|>\\n<|im_start|>assistant\\n

It starts with the end-of-turn token of the assistant's message, which a turn that was cut by a limit needs. If the last
sampled id is a stop token, the text up to and including the template's end-of-turn token is skipped.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.api.conversion import parse_json
from penstock.config.rollout import PromptConfig
from penstock.errors import ConfigError, InvalidInput, PromptTooLong, one_line
from penstock.trajectory import Prompt
from penstock.weights.folder_tensors import stop_token_ids, vocabulary_size
from penstock_rollout.metrics import RolloutMetrics

Message = Mapping[str, Any]
"""`role`, `content`, and further fields that the template reads (`name`, `tool_call_id`)."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""Tools in OpenAI's function format, as chat templates take them."""
TemplateArguments = Mapping[str, Any]
"""Keyword arguments of the chat template."""

_SPOKEN = "PENSTOCK_SPOKEN"
_NEXT = "PENSTOCK_NEXT"
_BASE: tuple[Message, ...] = ({"role": "user", "content": "0"}, {"role": "assistant", "content": _SPOKEN})


def with_argument_objects(message: Message) -> dict[str, Any]:
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
                call = {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}  # noqa: PLW2901
        calls.append(call)
    return {**plain, "tool_calls": calls}


class PromptLength:
    """Applies `rollout.prompt`: the longest allowed prompt, and the treatment of longer ones. The gateway cannot do
    this, because it has no tokenizer."""

    def __init__(self, config: PromptConfig, max_model_len: int, metrics: RolloutMetrics) -> None:
        self.config = config
        self.max_tokens = min(config.max_tokens or max_model_len - 1, max_model_len - 1)
        self.metrics = metrics

    def fit(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ids, truncated if they are too long. Raises PromptTooLong under `overlong: filter`."""
        excess = len(token_ids) - self.max_tokens
        if excess <= 0:
            return token_ids
        if self.config.overlong == "filter":
            raise PromptTooLong(
                "messages", f"{len(token_ids)} tokens are more than {self.max_tokens}; see rollout.prompt"
            )
        self.metrics.prompts_truncated.inc()
        if self.config.overlong == "truncate_left":
            return token_ids[excess:]
        if self.config.overlong == "truncate_right":
            return token_ids[:-excess]
        half = self.max_tokens // 2
        return token_ids[: self.max_tokens - half] + token_ids[len(token_ids) - half :]


class Tokenization:
    """The tokenizer of a model folder, and the turn boundaries of its chat template.

    `fit` shortens or refuses long prompts. `template_arguments` of a call win over those given here. With `explain`,
    its text in the first prompt shows the tools, and not the template. Decoded responses are for reading and scoring.
    They are never encoded again."""

    def __init__(
        self, model_path: Path, fit: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple,
        template_arguments: TemplateArguments | None = None, explain: Callable[[ToolSchemas], str] | None = None,
    ) -> None:  # fmt: skip
        from transformers import AutoTokenizer

        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path {model_path} has no usable tokenizer: {error}") from error
        self._fit = fit
        self._template_arguments = dict(template_arguments or {})
        self._explain = explain
        if (size := vocabulary_size(model_path)) is None:
            raise ConfigError(f"{model_path}/config.json does not say how many tokens the model has; add vocab_size")
        self._vocab_size = size
        self.stop_ids = frozenset(stop_token_ids(model_path))
        """Ids that end a turn. Engines keep the sampled stop token as the last token of a turn."""
        self._closing: dict[str, bool] = {}
        """By the role of the next message, whether the template ends an assistant turn with a stop token before it."""

    def without_limit(self) -> Tokenization:
        """The same for generate calls. `rollout.prompt` is for the prompts of the queue. A call that is too long for
        the model is refused, never truncated, and its history may be longer than a prompt of the queue."""
        unlimited = copy.copy(self)
        unlimited._fit = tuple
        return unlimited

    def prompt_ids(
        self, prompt: Prompt, tools: ToolSchemas = (), template_arguments: TemplateArguments | None = None
    ) -> tuple[int, ...]:
        """Encode the prompt of the first turn. If it consists of messages, it shows `tools` to the model."""
        if prompt.token_ids:
            if not all(0 <= token < self._vocab_size for token in prompt.token_ids):
                raise InvalidInput("token_ids", f"the model has ids from 0 to {self._vocab_size - 1}")
            return self._fit(prompt.token_ids)
        ids = self._encode(self.first_text(prompt.chat, tools, template_arguments))
        if not ids:
            raise InvalidInput("messages", "the model's chat template renders them as nothing")
        return self._fit(ids)

    def first_text(
        self, messages: Sequence[Message], tools: ToolSchemas = (), template_arguments: TemplateArguments | None = None
    ) -> str:
        """The text of the first prompt of these messages, which shows the tools."""
        if self._explain and tools:
            has_system = bool(messages) and messages[0]["role"] == "system"
            system = messages[0] if has_system else {"role": "system", "content": ""}
            text = "\n\n".join(filter(None, (system["content"], self._explain(tools))))
            messages, tools = [{**system, "content": text}, *messages[has_system:]], ()
        return self._render(messages, tools, template_arguments)

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Encode plain text without a chat template, with the special tokens that the tokenizer adds itself."""
        return self._fit(tuple(self.tokenizer(text)["input_ids"]))

    def continued_ids(
        self, history: tuple[int, ...], messages: Sequence[Message], tools: ToolSchemas = (),
        template_arguments: TemplateArguments | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """The ids of a sampled conversation and of the `messages` after it. The history is not encoded again."""
        return self._fit((*history, *self.next_ids(history[-1], messages, tools, template_arguments)))

    def continued_text_ids(self, history: tuple[int, ...], text: str) -> tuple[int, ...]:
        """The ids of a sampled conversation and of the plain text after it. The history is not encoded again. The stop
        token that ended the answer is not part of the text that a client has seen. It stays if the text goes on with
        it, as a rendered chat does, and is omitted otherwise."""
        if history[-1] in self.stop_ids:
            stop = self.tokenizer.decode([history[-1]], skip_special_tokens=False)
            history, text = (history, text[len(stop) :]) if text.startswith(stop) else (history[:-1], text)
        return self._fit((*history, *self._encode(text)))

    def next_ids(
        self, last_sampled: int, messages: Sequence[Message], tools: ToolSchemas = (),
        template_arguments: TemplateArguments | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """The ids between a turn that ended with `last_sampled` and the next turn, with `messages` between them."""
        before, after = self._split(messages, tools, template_arguments)
        whole, prefix = self._encode(before + after), self._encode(before)
        # A tokenizer may merge across the boundary. Then the appended part is encoded by itself.
        ids = whole[len(prefix) :] if whole[: len(prefix)] == prefix else self._encode(after)
        if last_sampled in self.stop_ids and self._closes(str(messages[0]["role"]), tools):
            return ids[next(index for index, token in enumerate(ids) if token in self.stop_ids) + 1 :]
        return ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def raw_text(self, token_ids: Sequence[int]) -> str:
        """Decode with special tokens, which tool calls may contain, but without stop tokens at the end."""
        ids = list(token_ids)
        while ids and ids[-1] in self.stop_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def _closes(self, role: str, tools: ToolSchemas) -> bool:
        if role not in self._closing:
            _, after = self._split([{"role": role, "content": _NEXT, "name": _NEXT}], tools, None)
            self._closing[role] = not self.stop_ids.isdisjoint(self._encode(after.partition(_NEXT)[0]))
        return self._closing[role]

    def _split(
        self, messages: Sequence[Message], tools: ToolSchemas, template_arguments: TemplateArguments | None
    ) -> tuple[str, str]:
        """The rendered fixed conversation, split after the marker. Templates that have the tools before the last
        message of the user would repeat those that the first prompt has explained."""
        tools = () if self._explain else tools
        before, marker, after = self._render([*_BASE, *messages], tools, template_arguments).partition(_SPOKEN)
        if not marker:
            raise ConfigError("the model's chat template omits the assistant's messages, which multi-turn agents need")
        return before + marker, after

    def _render(
        self, messages: Sequence[Message], tools: ToolSchemas, template_arguments: TemplateArguments | None
    ) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [with_argument_objects(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=True,
                tokenize=False,
                **{**self._template_arguments, **(template_arguments or {})},
            )
        except Exception as error:  # a template is code that comes with the model
            why = one_line(error)
            raise InvalidInput("messages", f"the model's chat template cannot render them: {why}") from error
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
