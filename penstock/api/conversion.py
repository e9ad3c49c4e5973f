"""Converts between protobuf messages and the records of the REST interface, field by field, by their names.

Records use natural JSON types. Where protobuf has bytes they have lists of numbers, where it has JSON text in a field
`NAME_json` they have the value as `NAME`, and enums are names. NaN and infinities become null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar, get_args

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic_core import from_json

from penstock.api import records
from penstock.errors import InvalidInput
from penstock.trajectory import MESSAGE_FIELDS
from penstock.v1 import groups_pb2

Json = dict[str, Any]
Get = Callable[[Any], Any]
M = TypeVar("M", bound=Message)
ARRAYS = {
    "token_ids": "<i4", "prompt_token_ids": "<i4", "inserted_token_ids": "<i4", "loss_mask": "u1", "log_probs": "<f4",
    "learner_log_probs": "<f4", "policy_versions": "<i8",
}  # fmt: skip
"""Types of the numbers in fields of bytes. A name has the same type in all messages."""
_ENCODER = json.JSONEncoder(allow_nan=False)
MAX_LEVELS = 190
_MAY_OVERFLOW = re.compile(r"[eE]\+?\d{3}|\d{200}")
"""Found in every JSON text with a number that Python reads as infinite, or cannot write again."""


def message_of(kind: type[M], source: object, **given: Any) -> M:
    """A message with the fields of `source` that have the same names, and with the `given` fields."""
    names = kind.DESCRIPTOR.fields_by_name
    found = {name: getattr(source, name) for name in names if name not in given and hasattr(source, name)}
    return kind(**found, **given)


def json_text(value: Any, path: str) -> str:
    """Write a value as JSON, or raise InvalidInput. What it writes, `parse_json` accepts."""
    if not value and isinstance(value, dict):
        return "{}"
    try:
        text = _ENCODER.encode(value)
        if "\\ud" in text:
            parse_json(text)
        check_levels(text)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"cannot be written as JSON ({error}); use text, numbers, lists and objects"
        raise InvalidInput(path, text) from error
    return text


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MAX_KEY_LENGTH = 256
"""Characters of an idempotency key, and of a data source."""


def check_label(label: str, path: str) -> None:
    if len(label) > MAX_KEY_LENGTH or _CONTROL.search(label):
        raise InvalidInput(path, f"may have {MAX_KEY_LENGTH} characters, none of them a control character")


def parse_json(text: str | bytes) -> Any:
    """Read JSON that can be stored, sent and read again by every part: no NaN, no number that Python reads as infinite
    or cannot write again, no half of a surrogate pair, no more than 200 levels. Raises ValueError otherwise."""
    value = from_json(text, allow_inf_nan=False)
    if len(text) > 4 and _MAY_OVERFLOW.search(text if isinstance(text, str) else text.decode()):
        _ENCODER.encode(value)
    return value


def check_levels(text: str) -> None:
    """Raise ValueError if a value has more than 190 levels: `parse_json` reads no more than 200 in answers with it."""
    if len(text) > MAX_LEVELS and text.count("[") + text.count("{") > MAX_LEVELS:
        from_json("[" * (201 - MAX_LEVELS) + text + "]" * (201 - MAX_LEVELS))


def to_json(message: Message, record: type[BaseModel]) -> Json:
    """The message as JSON that `record` reads."""
    if record is records.Message:
        return chat_message(message)
    return {name: get(message) for name, get in _getters(record, message.DESCRIPTOR)}


@cache
def _getters(record: type[BaseModel], kind: Any) -> tuple[tuple[str, Get], ...]:
    return tuple((name, _getter(record, name, kind)) for name in record.model_fields)


def _getter(record: type[BaseModel], name: str, kind: Any) -> Get:
    fields, annotation = kind.fields_by_name, record.model_fields[name].annotation
    if (record, name) in _COMPUTED:
        return _COMPUTED[record, name]
    if name not in fields and f"{name}_json" in fields:
        is_object = str(annotation).startswith("dict")
        return lambda message: json.loads(getattr(message, f"{name}_json") or ("{}" if is_object else "null"))
    if name not in fields:  # a whole session has the fields of its summary
        get = _getter(record, name, fields["summary"].message_type)
        return lambda message: get(message.summary)
    convert = _converter(fields[name], annotation)
    if fields[name].has_presence and type(None) in get_args(annotation):
        return lambda message: convert(getattr(message, name)) if message.HasField(name) else None
    return lambda message: convert(getattr(message, name))


def _converter(field: Any, annotation: Any) -> Get:
    """What a value of the field is in JSON."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_value = _converter(field.message_type.fields_by_name["value"], None)
        return lambda values: {str(key): of_value(values[key]) for key in sorted(values)}
    if field.message_type is not None:
        part = _record_in(annotation)
        if field.is_repeated:
            return lambda messages: [to_json(message, part) for message in messages]
        return lambda message: to_json(message, part)
    if field.is_repeated:
        return list
    if field.type == FieldDescriptor.TYPE_BYTES:
        if field.name == "group":
            return lambda data: to_json(groups_pb2.Group.FromString(data), records.Group) if data else None
        dtype = ARRAYS[field.name]
        return lambda data: np.frombuffer(data, dtype=dtype).tolist()
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return shortest
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return lambda value: value if math.isfinite(value) else None
    if field.enum_type is not None:
        is_lower = field.enum_type.name == "FinishReason"
        names = {value.number: value.name.lower() if is_lower else value.name for value in field.enum_type.values}
        return lambda number: names.get(number, str(number))
    return lambda value: value


def shortest(value: float) -> float:
    """A float32 as the number that its sender wrote: 0.7 and not 0.699999988079071."""
    return float(str(np.float32(value)))


def _record_in(annotation: Any) -> type[BaseModel]:
    """The record in an annotation such as `tuple[Policy, ...]` or `Policy | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(found for part in get_args(annotation) if part not in (..., type(None)) for found in [_record_in(part)])


def chat_message(message: Any) -> Json:
    further = json.loads(message.fields_json) if message.fields_json else {}
    return {"role": message.role, "content": message.content, **further}


def _token_versions(trajectory: Any) -> list[int]:
    """The policy version of each token."""
    return [segment.policy_version for segment in trajectory.segments for _ in range(segment.start, segment.end)]


_COMPUTED: dict[tuple[type[BaseModel], str], Get] = {
    (records.Trajectory, "policy_versions"): _token_versions,
    (records.SessionNode, "parent"): lambda node: node.parent if node.parent >= 0 else None,
}
"""Fields of records that a message has in another form."""


def request_of(kind: type[M], request: BaseModel, **given: Any) -> M:
    """A message with the fields of a request and the `given` fields. Raises InvalidInput with the path of a field
    that does not fit.

    The constructor builds all parts in place: to set fields one by one takes twice as long."""
    return kind(**_writer(type(request), kind.DESCRIPTOR)(request) | given)


@cache
def _writer(record: type[BaseModel], kind: Any) -> Get:
    """Return a function that gives a record's fields as `kind`'s constructor takes them, without empty defaults."""
    if record is records.Message:
        return _chat_values
    fields: dict[str, tuple[str, Get | None]] = {}
    defaults: Json = {}
    for name, info in record.model_fields.items():
        field = kind.fields_by_name.get(name)
        field_name, convert = name if field else f"{name}_json", _field_writer(name, field, info.annotation)
        fields[name] = field_name, convert
        if not info.is_required():
            default = info.get_default(call_default_factory=True)
            defaults[field_name] = convert(default) if convert else default
    defaults = {name: value for name, value in defaults.items() if value}

    def write(request: BaseModel) -> Json:
        found, values = request.__dict__, defaults.copy()
        for name in request.__pydantic_fields_set__:
            field_name, convert = fields[name]
            values[field_name] = convert(found[name]) if convert else found[name]
        return values

    return write


def _field_writer(name: str, field: Any, annotation: Any) -> Get | None:
    """How a value becomes the field's; None if it is the same."""
    if field is None:
        return lambda value: json_text(value, name)
    kind = field.message_type
    if kind is not None and not kind.GetOptions().map_entry:
        write = _writer(_record_in(annotation), kind)
        return _writer_of_parts(name, write) if field.is_repeated else write
    if field.type == FieldDescriptor.TYPE_BYTES:
        dtype = ARRAYS[name]
        return lambda value: np.asarray(value, dtype=dtype).tobytes() if value else b""
    return None if field.enum_type is None else _writer_of_enum(name, field.enum_type)


def _writer_of_parts(name: str, write_part: Get) -> Get:
    def write(values: Sequence[BaseModel]) -> list[Json]:
        written: list[Json] = []
        try:
            for value in values:
                written.append(write_part(value))  # noqa: PERF401  (its length is the index of the wrong one)
        except InvalidInput as error:
            raise error.under(f"{name}[{len(written)}]") from error
        return written

    return write


def _writer_of_enum(name: str, kind: Any) -> Get:
    numbers: dict[str, int] = {value.name: value.number for value in kind.values if value.number}

    def write(value: str) -> int:
        if value and value not in numbers:
            raise InvalidInput(name, f"must be one of {', '.join(numbers)}")
        return numbers.get(value, 0)

    return write


def _chat_values(given: records.Message) -> Json:
    found = given.__dict__
    values = {"role": found["role"], "content": found["content"] or ""}
    if found["content"] is None and not found["tool_calls"]:
        raise InvalidInput("content", "must be text, unless the message has tool_calls")
    if further := {name: value for name in MESSAGE_FIELDS if (value := found[name]) not in (None, ())}:
        values["fields_json"] = json_text(further, "tool_calls")
    return values
