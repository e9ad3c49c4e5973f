"""Fields of messages besides role and content reach the chat template, from datasets and from the generate routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.trajectory import Prompt
from penstock.v1 import generate_pb2, prompts_pb2
from penstock_rollout.serving.generate_service import GenerateService
from penstock_rollout.tokenization import Tokenization
from support.scripted_engines import CHATML, make_tokenizer_folder

SHOWN = (
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }})"
    "{% endfor %}{{ message.content | trim }}"
)


@pytest.fixture(scope="module")
def tokenization(tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    folder: Path = tmp_path_factory.mktemp("model")
    return Tokenization(make_tokenizer_folder(folder, CHATML.replace("{{ message.content | trim }}", SHOWN)))


def fields(arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}]}


def rendered(tokenization: Tokenization, arguments: Any) -> str:
    prompt = Prompt(messages=(("user", "hi"), ("assistant", "")), message_fields={1: fields(arguments)})
    return tokenization.raw_text(tokenization.prompt_ids(prompt))


@pytest.mark.parametrize("arguments", [{"a": 2}, '{"a": 2}'])
def test_arguments_reach_the_template_as_an_object(tokenization: Tokenization, arguments: Any) -> None:
    assert '(add {"a": 2})' in rendered(tokenization, arguments), "also if they are JSON text, as in OpenAI's API"


def test_arguments_that_are_not_json_stay_as_they_are(tokenization: Tokenization) -> None:
    assert '(add "a, 2")' in rendered(tokenization, "a, 2")


def test_half_of_a_surrogate_pair_in_arguments_stays_escaped(tmp_path: Path) -> None:
    """Alone it is not text, and no tokenizer takes it."""
    shown = SHOWN.replace(" | tojson", " | string")
    plain = Tokenization(make_tokenizer_folder(tmp_path, CHATML.replace("{{ message.content | trim }}", shown)))
    assert '(add {"a": "' in rendered(plain, '{"a": "\\ud83d"}')


def test_the_generate_routes_pass_them_on(tokenization: Tokenization) -> None:
    service = GenerateService("test", "rollout-0", cast(Any, None), tokenization, 4096)
    message = prompts_pb2.Message(role="assistant", fields_json=json.dumps(fields({"a": 2})))
    ids = service._prompt_ids(generate_pb2.GenerateRequest(messages=[message]))
    assert '(add {"a": 2})' in tokenization.raw_text(ids)
