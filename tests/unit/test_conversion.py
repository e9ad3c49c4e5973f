"""Records and messages: every field of one is a field of the other, and keeps its value."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from penstock.api import conversion, records
from penstock.api.conversion import request_of, to_json
from penstock.errors import InvalidInput
from penstock.v1 import groups_pb2, prompts_pb2, tasks_pb2
from penstock_services.gateway.operations import Operation
from penstock_services.gateway.run import OPERATIONS
from penstock_services.gateway.sessions.handlers import NewTaskRequest, SubmitTasks

ROOT = Path(__file__).parents[2]
PROTO_OPERATIONS = [operation for operation in OPERATIONS if operation.rpcs and operation.path]
NOT_SERVED = {"trace_parent", "owner", "segments", "routed_experts", "token_rewards", "server_ids", "episode"}
"""Fields that belong to the learner, to tracing or to the gateway. Samples show their owner all the same."""


def filled(kind: Any) -> Any:
    """A message with a value in every field."""
    message = GetMessageClass(kind)()
    for number, field in enumerate(kind.fields, 1):
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key = 2 if field.message_type.fields_by_name["key"].cpp_type != FieldDescriptor.CPPTYPE_STRING else "key"
            getattr(message, field.name)[key] = number
        elif field.message_type is not None:
            part = filled(field.message_type)
            target = getattr(message, field.name)
            target.add().CopyFrom(part) if field.is_repeated else target.CopyFrom(part)
        elif field.name.endswith("_json"):
            setattr(message, field.name, json.dumps({"name": f"name {number}"}))
        elif field.name == "group":
            message.group = filled(groups_pb2.Group.DESCRIPTOR).SerializeToString()
        elif field.type == FieldDescriptor.TYPE_BYTES:
            setattr(message, field.name, bytes(range(8)))
        else:
            value = {
                FieldDescriptor.CPPTYPE_STRING: f"{field.name} {number}", FieldDescriptor.CPPTYPE_BOOL: True,
                FieldDescriptor.CPPTYPE_FLOAT: number / 16,
            }.get(field.cpp_type, 1 if field.enum_type is not None else number)  # fmt: skip
            getattr(message, field.name).append(value) if field.is_repeated else setattr(message, field.name, value)
    if "segments" in kind.fields_by_name:
        del message.segments[:]
        message.segments.add(start=0, end=2, policy_version=5)
    return message


def names_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return {*value, *(name for part in value.values() for name in names_of(part))}
    return {name for part in value for name in names_of(part)} if isinstance(value, list) else set()


def fields_of(kind: Any) -> set[str]:
    """Names of all fields of a message and its parts, as JSON has them."""
    found: set[str] = set()
    for field in kind.fields:
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.name not in NOT_SERVED | {"summary", "fields_json"}:
            found.add(field.name.removesuffix("_json"))
        if field.message_type is not None and not is_map and field.name not in NOT_SERVED:
            found |= fields_of(field.message_type)
    return found


@pytest.mark.parametrize("operation", PROTO_OPERATIONS, ids=lambda operation: operation.name)
def test_every_field_of_an_answer_reaches_clients(operation: Operation) -> None:
    kind = operation.rpcs[0].output_type
    answer = json.loads(json.dumps(to_json(filled(kind), operation.answer)))  # type: ignore[arg-type]
    assert fields_of(kind) <= names_of(answer)
    read = operation.answer.model_validate(answer, extra="forbid")  # type: ignore[union-attr]
    assert json.loads(read.model_dump_json()).keys() == answer.keys()


@pytest.mark.parametrize("operation", PROTO_OPERATIONS, ids=lambda operation: operation.name)
def test_every_field_of_a_request_can_be_sent(operation: Operation) -> None:
    if operation.read is not None or operation.takes is None:
        return
    wanted = {field.name.removesuffix("_json") for field in operation.rpcs[0].input_type.fields}
    assert wanted - {"run"} <= {*operation.takes.model_fields, *conversion_path(operation)}


def conversion_path(operation: Operation) -> set[str]:
    return {part.strip("{}").partition("}")[0] for part in operation.path.split("/") if part.startswith("{")}


def test_a_prompt_comes_back_as_it_was_submitted() -> None:
    body = {
        "messages": [
            {"role": "user", "content": "2+2?", "name": "me"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        ],
        "token_ids": [], "num_samples": 2, "agent_name": "a", "data_source": "d", "ground_truth": {"answer": [4]},
        "extra_info": {"index": 1}, "priority": -3, "evaluation_id": "",
        "sampling": {"temperature": 0.7, "top_p": 0.9, "max_tokens": 16, "seed": 0, "top_k": 5, "min_p": 0.1,
                     "ignore_eos": True, "stop": ["x"]},
    }  # fmt: skip
    message = request_of(prompts_pb2.Prompt, records.SubmittedPrompt.model_validate(body, extra="forbid"))
    assert to_json(message, records.SubmittedPrompt) == body
    tokens = request_of(prompts_pb2.Prompt, records.SubmittedPrompt(token_ids=(1, 2)))
    assert to_json(tokens, records.SubmittedPrompt)["token_ids"] == [1, 2]
    assert tokens.HasField("sampling") and not tokens.sampling.HasField("seed")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", 10**5000], ids=["nan", "inf", "half", "long"])
def test_what_json_cannot_hold_is_refused_by_its_path(value: Any) -> None:
    task = NewTaskRequest.model_construct(payload=value)
    request = SubmitTasks.model_construct(tasks=(task,))
    with pytest.raises(InvalidInput) as caught:
        request_of(tasks_pb2.SubmitTasksRequest, request)
    assert caught.value.field == "tasks[0].payload"


def test_arrays_have_one_type_in_all_messages() -> None:
    assert conversion.ARRAYS["token_ids"] == "<i4" and conversion.shortest(0.699999988079071) == 0.7


def test_the_table_of_operations_is_made_from_the_declarations() -> None:
    build = runpy.run_path(str(ROOT / "docs" / "make_operations.py"))["build"]
    assert (ROOT / "docs" / "gateway.md").read_text() == build(), "run docs/make_operations.py"
