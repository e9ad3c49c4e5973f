"""Damaged data and damaged gRPC requests, and the number of examples that each command tries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

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


def try_examples(num_examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Call `check` with examples of the strategy."""

    @settings(
        max_examples=num_examples, deadline=None, database=None, derandomize=num_examples == FEW,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink],
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
