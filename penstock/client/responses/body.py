"""What the bodies of all responses share."""

from __future__ import annotations

from typing import TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, TypeAdapter

from penstock.errors import PenstockError

T = TypeVar("T")


def read_response(response: httpx.Response, kind: type[T], part: str = "") -> T:
    """Return the body as `kind`, or the field of it that is named `part`."""
    try:
        body = response.json()
        return TypeAdapter(kind).validate_python(body[part] if part else body)
    except (ValueError, KeyError, TypeError) as error:
        raise PenstockError(f"{response.url} did not answer as a gateway does ({error}); check the URL") from error


class ResponseBody(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


Metrics = dict[str, float | None]
"""Values by metric name. None stands for NaN or infinity, which JSON has no number for."""
