"""Which tokens of a conversation are trained, against a plain reading of the tokens of several chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from penstock.errors import InvalidInput
from penstock_tools.sft.data import ConversationMasks

QWEN = (
    "{% if tools %}<|im_start|>system{{ '\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "<|im_end|>\n"
    "{% elif messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ message.content }}{{ '\n' }}</tool_response><|im_end|>\n"
    "{% elif message.tool_calls %}<|im_start|>assistant{% if message.content %}{{ '\n' + message.content }}{% endif %}"
    "{% for call in message.tool_calls %}{{ '\n' }}<tool_call>{{ '\n' }}{{ call.function | tojson }}"
    "{{ '\n' }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like Qwen3's: the reasoning of earlier turns is left out."""
REWRITING = (
    "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<reason>{% endif %}"
)
"""Like R1's: what is generated begins after a text that is not in the conversation."""
SPECIAL = (
    "<|bos|>", "<|im_end|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]",
    "[/INST]",
)  # fmt: skip
CHAT = [
    {"role": "user", "content": "abc?"},
    {"role": "assistant", "content": " <think>b</think>abc\n"},
    {"role": "user", "content": "and abc"},
    {"role": "assistant", "content": "<think>c</think>cab"},
]


def make_tokenizer(template: str) -> Any:
    """Bytes, with two merges, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet, "ab", "abc", "\u010a\u010a", "\u010aa"])}
    merges = [("a", "b"), ("ab", "c"), ("\u010a", "\u010a"), ("\u010a", "a")]
    inner = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<|bos|>", eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def found(template: str, chat: list[dict[str, Any]], train_on: Any = "all", tools: Any = ()) -> list[list[str]]:
    """The sequences as texts, in which each run of trained tokens is its own entry: untrained, trained, untrained, …"""
    tokenizer = make_tokenizer(template)
    sequences = []
    for example in ConversationMasks(tokenizer, {}).sequences("row 0", chat, tools, train_on):
        runs: list[list[int]] = []
        for index, token in enumerate(example.token_ids):
            if index == 0 or example.loss_mask[index] != example.loss_mask[index - 1]:
                runs.append([])
            runs[-1].append(token)
        sequences.append([tokenizer.decode(run) for run in runs])
    return sequences


def expected(template: str, chat: list[dict[str, Any]], start: str, end: str) -> list[str]:
    """A plain reading: in the whole text, each part from after `start` up to and with `end` is trained."""
    text = make_tokenizer(template).apply_chat_template(chat, tokenize=False)
    parts, rest = [], text
    while start in rest:
        before, _, rest = rest.partition(start)
        turn, _, rest = rest.partition(end)
        parts += [before + start, turn + end]
    assert rest == ""
    return parts


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        (QWEN, "<|im_start|>assistant\n", "<|im_end|>\n"),
        (LLAMA, "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        (MISTRAL, "[/INST]", "<|im_end|>"),
    ],
)
def test_the_masks_are_those_of_a_plain_reading(template: str, start: str, end: str) -> None:
    parts = expected(template, CHAT, start, end)
    assert len(parts) == 4
    assert found(template, CHAT) == [parts], "one sequence with both turns"
    assert found(template, CHAT, "last") == [["".join(parts[:3]), parts[3]]]


def test_tokens_are_those_of_the_whole_text_and_of_the_prompt_of_an_engine() -> None:
    tokenizer = make_tokenizer(QWEN)
    (example,) = ConversationMasks(tokenizer, {}).sequences("row 0", CHAT, (), "all")
    whole = tokenizer(tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)["input_ids"]
    assert list(example.token_ids) == whole
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert example.prompt_length == len(tokenizer(prompt, add_special_tokens=False)["input_ids"])


def test_a_template_that_changes_earlier_turns_gives_each_turn_its_own_sequence() -> None:
    first = ["<|im_start|>user\nabc?<|im_end|>\n<|im_start|>assistant\n", " <think>b</think>abc\n<|im_end|>\n"]
    second = [
        "<|im_start|>user\nabc?<|im_end|>\n<|im_start|>assistant\nabc\n<|im_end|>\n"
        "<|im_start|>user\nand abc<|im_end|>\n<|im_start|>assistant\n",
        "<think>c</think>cab<|im_end|>\n",
    ]
    assert found(THINKING, CHAT) == [first, second]
    assert found(THINKING, CHAT, "last") == [second]
    plain = [{**message, "content": message["content"].split("</think>")[-1]} for message in CHAT]
    assert len(found(THINKING, plain)) == 1, "a chat without reasoning stays whole"


def test_a_turn_that_does_not_follow_from_its_prompt_is_refused() -> None:
    with pytest.raises(InvalidInput, match="row 0: the chat template writes message 1 in a way that does not follow"):
        found(REWRITING, CHAT)


def test_a_tokenizer_that_merges_over_the_boundary_trains_what_follows_the_prompt() -> None:
    """The template ends the prompt with a new line, which the tokenizer merges with an `a` after it."""
    chat = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "a"}]
    tokenizer = make_tokenizer(QWEN)
    (example,) = ConversationMasks(tokenizer, {}).sequences("row 0", chat, (), "all")
    prompt = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    ids = tuple(tokenizer(prompt, add_special_tokens=False)["input_ids"])
    assert example.token_ids[: example.prompt_length] == ids, "the prompt is what an engine gets"
    assert tokenizer.decode(example.token_ids[len(ids) :]) == "a<|im_end|>\n"
    whole = tokenizer(prompt + "a<|im_end|>\n", add_special_tokens=False)["input_ids"]
    assert tuple(whole) != example.token_ids, "the case is the one that it says"


def test_arguments_of_a_tool_call_are_rendered_as_in_a_rollout() -> None:
    """OpenAI's API has them as JSON text. Templates would quote that once more, and a rollout gives them objects."""

    def chat(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        return [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    as_text, as_object = found(QWEN, chat('{"a": 1}')), found(QWEN, chat({"a": 1}))
    assert as_text == as_object and '"arguments": {"a": 1}' in as_text[0][1]


def test_tool_calls_are_trained_and_results_are_not() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "c7"},
        {"role": "user", "content": "left out"},
    ]
    ((system, calls, result, answer),) = found(QWEN, chat, tools=[{"name": "add"}])
    assert system.startswith('<|im_start|>system\n{"name": "add"}')
    assert calls == 'b\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
    assert "<tool_response>\n7\n" in result and answer == "c7<|im_end|>\n"
    with pytest.raises(InvalidInput, match="does not end with a message of the assistant"):
        found(QWEN, chat, "last")


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (QWEN, CHAT[:1], "has no message of the assistant"),
        ("", CHAT, "has no chat template"),
        ("{{ raise_exception('no system') }}", CHAT, "cannot render it: no system"),
    ],
)
def test_what_cannot_be_trained_is_refused(template: str, chat: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        found(template, chat)
