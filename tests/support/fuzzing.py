"""Damaged data, damaged requests, requests with hostile values, and the number of examples that each command tries."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

FEW, MANY = 40, 5_000
BUDGETS = pytest.mark.parametrize(
    "num_examples", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.long)]
)
"""`make test` tries few examples, always the same; `make test-long` tries many, others each time."""


def damaged(data: bytes) -> st.SearchStrategy[bytes]:
    """Some of its bytes changed, a piece cut out, inserted or repeated, or other bytes altogether."""
    places = st.integers(0, max(0, len(data) - 1))
    changed = st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8).map(lambda c: _changed(data, c))
    cut = st.tuples(places, places).map(lambda p: data[: min(p)] + data[max(p) :])
    repeated = st.tuples(places, places).map(lambda p: data[: max(p)] + data[min(p) :])
    inserted = st.tuples(places, st.binary(max_size=40)).map(lambda p: data[: p[0]] + p[1] + data[p[0] :])
    return st.one_of(changed, cut, repeated, inserted, st.binary(max_size=200))


def _changed(data: bytes, changes: list[tuple[int, int]]) -> bytes:
    copy = bytearray(data)
    for place, value in changes:
        if copy:
            copy[place] = value
    return bytes(copy)


def json_values() -> st.SearchStrategy[Any]:
    """Any value of JSON, with numbers of any size."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    return st.recursive(
        plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3), max_leaves=8
    )


def try_examples(
    num_examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None], *, shrinks: bool = True
) -> None:
    """Call `check` with examples of the strategy. The first one that fails is made smaller if it `shrinks`."""

    @settings(
        max_examples=num_examples, deadline=None, database=None, derandomize=num_examples <= FEW,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
    )  # fmt: skip
    @given(example=strategy)
    def one(example: Any) -> None:
        check(example)

    one()


Metadata = tuple[tuple[str, str], ...]
_VALUES: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_STRING: "a",
    FieldDescriptor.CPPTYPE_BOOL: True,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.5,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
}
_MAX_DEPTH = 3


def methods_of(contract: Any) -> Iterator[MethodDescriptor]:
    """The methods of all services of a generated module."""
    for service in contract.DESCRIPTOR.services_by_name.values():
        yield from service.methods_by_name.values()


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def whole_request(method: MethodDescriptor, known: Mapping[str, Message]) -> bytes:
    """A request to damage: that of `known`, by the name of its type, or one with every field set."""
    name = method.input_type.full_name.rpartition(".")[2]
    message = known.get(name)
    if message is None:
        message = GetMessageClass(method.input_type)()
        _fill(message, _MAX_DEPTH)
    return message.SerializeToString()


def _fill(message: Message, depth: int) -> None:
    for field in message.DESCRIPTOR.fields:
        if field.name == "run" or (field.message_type and (depth == 0 or field.message_type.GetOptions().map_entry)):
            continue
        if field.message_type and field.is_repeated:
            _fill(getattr(message, field.name).add(), depth - 1)
        elif field.message_type:
            _fill(getattr(message, field.name), depth - 1)
        else:
            value = b"\1\0\0\0" if field.type == FieldDescriptor.TYPE_BYTES else _VALUES.get(field.cpp_type, 1)
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)


def damaged_requests(whole: bytes, num_examples: int) -> list[bytes]:
    """The request as it is, without a byte, and damaged in different ways."""
    found = [whole, b""]
    try_examples(num_examples, damaged(whole), found.append)
    return found


async def answer_of(
    channel: grpc.aio.Channel, method: MethodDescriptor, data: bytes, metadata: Metadata, timeout_s: float
) -> tuple[grpc.StatusCode, str]:
    """Send bytes as a request. Returns the code and the details of the answer. A stream that goes on is cancelled after
    `timeout_s`, as DEADLINE_EXCEEDED."""
    path: Any = path_of(method)
    options: Any = {"metadata": metadata, "timeout": timeout_s}
    try:
        if not method.server_streaming:
            await channel.unary_unary(path)(data, **options)
            return grpc.StatusCode.OK, ""
        call: Any = (
            channel.stream_stream(path)(iter([data]), **options)
            if method.client_streaming
            else channel.unary_stream(path)(data, **options)
        )
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


Place = tuple[str | int, ...]
"""Where a value is in a request: names of fields and numbers of entries. KEY stands for a name of a dictionary."""
KEY = "<key>"
TEXTS = (
    "\ud83d", "a\udc00b", "\0", "a\0b", "", " ", "a\nb", "a\r\nX-Evil: 1", "a:b", "x:fingerprint", "../../x", "é",
    "\N{GRINNING FACE}", '{"a": "\\ud83d", "b": NaN}', "\ufeff", "\u2028", "%s{0}$(x)", "-", "latest", "0", "-1",
    "x" * 300, "x" * 100_000, "\ud83d" * 300,
)  # fmt: skip
NUMBERS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e308", "-1e308", "5e-324", "-0.0", "0", "-1", "1", "0.5",
    "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "1" * 400,
    "1" * 5000, "1e400",
)  # fmt: skip
NESTED = (
    "null", "true", "[]", "{}", '["\\ud83d"]', '{"a": {"b": [null, "\\ud83d"]}}', '{"\\ud800": 1}', '{"a": NaN}',
    '{"a": [1e999]}', '{"a\\u0000": "\\u0000"}', '{"a": 1, "a": 2}', '{"": ""}', "[" * 150 + "]" * 150,
    "[" * 250 + "]" * 250, "[" * 5000 + "]" * 5000, '{"a":' * 150 + "1" + "}" * 150, "{", '"a', "",
)  # fmt: skip
FRAGMENTS = (*map(json.dumps, TEXTS), *NUMBERS, *NESTED)
"""Pieces of JSON that a careless service stores and cannot show, or cannot even read."""


def json_fragments() -> st.SearchStrategy[str]:
    """Pieces of JSON, some of them not valid."""
    return st.sampled_from(FRAGMENTS) | json_values().map(json.dumps) | st.text(max_size=30).map(json.dumps)


def with_fragment(seed: Any, place: Place, fragment: str) -> bytes:
    """The JSON of `seed` with a piece of JSON at this place."""
    mark = "\ue000mark\ue000"
    text = json.dumps(_replaced(seed, place, mark))
    return text.replace(json.dumps(mark), fragment).encode()


def _replaced(value: Any, place: Place, mark: str) -> Any:
    if not place:
        return mark
    first, *rest = place
    if isinstance(first, int):
        parts = value if isinstance(value, list) and value else [None]
        return [_replaced(parts[0], tuple(rest), mark), *parts[1:]]
    fields = value if isinstance(value, dict) else {}
    if first == KEY:
        return {mark: next(iter(fields.values()), 1)}
    return fields | {first: _replaced(fields.get(first), tuple(rest), mark)}


def json_places(kind: type[BaseModel] | None, seed: Any) -> list[Place]:
    """Every field of a model, if there is one, and of the models in it, and every value of the seed."""
    found = dict.fromkeys(_model_places(kind) if kind else ())
    found |= dict.fromkeys(_value_places(seed))
    return [place for place in found if place]


def _model_places(kind: type[BaseModel]) -> Iterator[Place]:
    for name, field in kind.model_fields.items():
        key, text = field.alias or name, str(field.annotation)
        yield (key,)
        start: Place = (key, 0) if text.startswith(("tuple[", "list[")) or "list[" in text else (key,)
        parts = [part for part in _types_in(field.annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        for part in parts:
            yield from ((*start, *rest) for rest in _model_places(part))
        if start != (key,):
            yield start
        if "dict[" in text:
            yield from ((*start, KEY), (*start, "a"))


def _types_in(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in get_args(annotation):
        yield from _types_in(part)


def _value_places(value: Any) -> Iterator[Place]:
    yield ()
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, part in pairs:
        yield from ((key, *rest) for rest in _value_places(part))


def minimal(kind: type[BaseModel]) -> Any:
    """A value for every field that a model requires."""
    return {
        field.alias or name: _some(field.annotation) for name, field in kind.model_fields.items() if field.is_required()
    }


def _some(annotation: Any) -> Any:
    found = [*_types_in(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return minimal(annotation)
    if get_origin(annotation) is Literal:
        return get_args(annotation)[0]
    if get_origin(annotation) in (tuple, list):
        return [_some(get_args(annotation)[0])]
    return "a" if str in found else 1


INVALID_UTF8 = "\x1aQ\x1a"
"""Becomes the bytes of half of a surrogate pair, which Python's protobuf would not write."""
_INTEGERS = (-(2**63), -(2**31), -1, 0, 1, 7, 2**31 - 1, 2**63 - 1)
_FLOATS = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0, -1.0, 0.5)


def message_places(kind: Any, depth: int = 4) -> Iterator[tuple[Place, FieldDescriptor]]:
    """Every field of a message, and of the messages in it."""
    for field in kind.fields:
        if field.message_type is None:
            yield (field.name,), field
        elif field.message_type.GetOptions().map_entry:
            yield from (((field.name, name), field.message_type.fields_by_name[name]) for name in ("key", "value"))
        elif depth:
            yield from (((field.name, *rest), leaf) for rest, leaf in message_places(field.message_type, depth - 1))


def field_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values that fit the type of the field, and that no careful service takes unseen."""
    if field.type == FieldDescriptor.TYPE_STRING:
        if field.name.endswith("_json") or field.name == "json_schema":
            return json_fragments().map(lambda text: text.encode("utf-8", "replace").decode())
        texts = [text for text in TEXTS if "\ud83d" not in text and "\udc00" not in text]
        return st.sampled_from([INVALID_UTF8, *texts]) | st.text(st.characters(codec="utf-8"), max_size=30)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.sampled_from([b"", b"\0", b"\xff" * 4, b"\1\0\0\0" * 3, b"x" * 100_001]) | st.binary(max_size=40)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_FLOATS) | st.floats()
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    bits = 31 if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_ENUM) else 63
    integers = [number for number in _INTEGERS if -(2**bits) <= number < 2**bits]
    return st.sampled_from(integers) | st.integers(-(2**bits), 2**bits - 1)


def set_field(message: Message, place: Place, value: Any) -> bytes:
    """The bytes of the message with a value at this place. The message is changed."""
    target: Any = message
    *parents, name = place
    for number, parent in enumerate(parents):
        kind = target.DESCRIPTOR.fields_by_name[parent]
        if kind.message_type.GetOptions().map_entry:
            entries = getattr(target, parent)
            entries.clear()
            entries.update({value: 1.0} if place[number + 1] == "key" else {"a": value})
            return message.SerializeToString().replace(INVALID_UTF8.encode(), b"\xed\xa0\xbd")
        target = getattr(target, parent)
        if kind.is_repeated:
            target = target[0] if len(target) else target.add()
    if target.DESCRIPTOR.fields_by_name[name].is_repeated:
        getattr(target, str(name))[:] = [value]
    else:
        setattr(target, str(name), value)
    return message.SerializeToString().replace(INVALID_UTF8.encode(), b"\xed\xa0\xbd")
