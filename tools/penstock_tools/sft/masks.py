"""Which tokens of a conversation are trained: those that the model would have to write itself.

A trained turn has the prompt that an engine would get for it: the messages before it, as the chat template writes them
with the start of the assistant's next turn. What the template writes after that for the turn is trained. For example,
with a Qwen template:

    <|im_start|>user\\n1+1?<|im_end|>\\n<|im_start|>assistant\\n2<|im_end|>\\n<|im_start|>user\\n…<|im_start|>assistant\\n5<|im_end|>\\n
    └───────────────── prompt ─────────────────────┘└── trained ──┘└──────────── prompt ─────────────┘└── trained ──┘

Turns share a sequence as long as the prompt of the next turn begins with exactly the tokens so far. Some templates
change earlier turns, for example drop their reasoning. Then a new sequence begins with the prompt of that turn.
So every trained token is preceded by what precedes it in a rollout, whatever the template does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.errors import InvalidInput

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One sequence, and which of its tokens are trained."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 for each trained token, else 0. The first token cannot be trained: nothing precedes it."""

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one."""
        return self.loss_mask.index(1)

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)

    @classmethod
    def of(cls, prompt: Sequence[int], trained: Sequence[int]) -> Example:
        return cls((*prompt, *trained), (0,) * len(prompt) + (1,) * len(trained))


class ConversationMasks:
    """Makes sequences of conversations with one tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, template_arguments: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template_arguments = dict(template_arguments)

    def sequences(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any], train_on: Literal["all", "last"]
    ) -> list[Example]:
        """The sequences of a conversation. Messages after its last trained turn have no effect, and are skipped.

        Raises InvalidInput, which names the row as `where`, if it has no trained turn, or if the template does not let
        a turn be distinguished from its prompt."""
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise InvalidInput(where, "has no message of the assistant, so nothing can be trained; remove the row")
        if turns[0] == 0:
            raise InvalidInput(where, "begins with a message of the assistant, which has no prompt; put one before it")
        if train_on == "last":
            if turns[-1] != len(messages) - 1:
                raise InvalidInput(where, "does not end with a message of the assistant, which sft.train_on last needs")
            turns = turns[-1:]
        found: list[Example] = []
        for index in turns:
            prompt, turn = self._turn(where, messages[: index + 1], tools)
            if found and prompt[: len(found[-1].token_ids)] == found[-1].token_ids:
                before = found.pop()
                untrained = prompt[len(before.token_ids) :]
                mask = (*before.loss_mask, *(0 for _ in untrained), *(1 for _ in turn))
                found.append(Example((*prompt, *turn), mask))
            else:
                found.append(Example.of(prompt, turn))
        return found

    def prompt_ids(self, where: str, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[int, ...]:
        """The tokens of a conversation up to the start of the assistant's next turn."""
        return self.encode(self._render(where, messages, tools, add_generation_prompt=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text alone, without those that a tokenizer puts around it."""
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _turn(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens of the prompt of the last message, and those of the message."""
        prompt = self._render(where, messages[:-1], tools, add_generation_prompt=True)
        whole = self._render(where, messages, tools, add_generation_prompt=False)
        if not whole.startswith(prompt) or whole == prompt:
            raise InvalidInput(
                where,
                f"the chat template writes message {len(messages) - 1} in a way that does not follow from its prompt, "
                "so its tokens cannot be identified; use the columns `prompt` and `response`, or another template",
            )
        prompt_ids, whole_ids = self.encode(prompt), self.encode(whole)
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, whole_ids[len(prompt_ids) :]
        # The tokenizer merges across the boundary. A model that gets the prompt alone writes the turn by itself.
        turn_ids = self.encode(whole[len(prompt) :])
        if self._decode((*prompt_ids, *turn_ids)) != self._decode(whole_ids):
            raise InvalidInput(
                where,
                f"the tokenizer writes message {len(messages) - 1} differently after its prompt than alone; use the "
                "columns `prompt` and `response`",
            )
        return prompt_ids, turn_ids

    def _render(
        self, where: str, messages: Sequence[Message], tools: Sequence[Any], *, add_generation_prompt: bool
    ) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise InvalidInput(
                where, "has messages, but the model's tokenizer has no chat template; use `prompt` and `response`"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_arguments,
            )
        except Exception as error:  # a template is code that comes with the model
            why = " ".join(str(error).split())
            raise InvalidInput(where, f"the model's chat template cannot render it: {why}") from error
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
