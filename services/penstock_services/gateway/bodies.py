"""JSON of the REST interface: types and conversions that the bodies of all resources share.

Bodies use natural JSON types. Where protobuf has bytes they have lists of numbers, where it has JSON text they have
values, and where its own JSON mapping has strings they have integers. NaN and infinities become null.
"""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any

import numpy as np
from google.protobuf.message import Message
from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json
from starlette.requests import Request

from penstock.errors import InvalidInput

Json = dict[str, Any]
_ENCODER = json.JSONEncoder(allow_nan=False)
_MAY_OVERFLOW = re.compile(r"[eE]\+?\d{3}|\d{200}")
"""Found in every JSON text with a number that Python reads as infinite, or cannot write again."""
Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def plain_fields(message: Message) -> Json:
    """All fields of a message whose fields are numbers and strings."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def shortest(value: float) -> float:
    """A float32 as the number that its sender wrote: 0.7 and not 0.699999988079071."""
    return float(str(np.float32(value)))


def finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def to_json_text(value: Any, path: str) -> str:
    """Write a value as JSON, or raise InvalidInput. What it writes, `parse_json` accepts."""
    if not value and isinstance(value, dict):
        return "{}"
    try:
        text = _ENCODER.encode(value)
        if "\\ud" in text:
            parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(path, f"is not valid JSON: {error}") from error
    return text


def parse_json(text: str | bytes) -> Any:
    """Read JSON that can be stored, sent and read again by every part: no NaN, no number that Python reads as infinite
    or cannot write again, no half of a surrogate pair, no more than 200 levels. Raises ValueError otherwise."""
    value = from_json(text, allow_inf_nan=False)
    if _MAY_OVERFLOW.search(text if isinstance(text, str) else text.decode()):
        _ENCODER.encode(value)
    return value


class StrictRequest(Request):
    """A request whose JSON body is read by `parse_json`."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = parse_json(body)
            except ValueError as error:
                raise json.JSONDecodeError(str(error), body.decode(errors="replace"), 0) from error
        return self._json
