"""Reading records that another version of Penstock may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


def read_known_fields(kind: type[T], record: Mapping[str, Any]) -> T:
    """Build the dataclass `kind` from a record. During a rolling upgrade the writer may be newer or older than the
    reader: fields that `kind` does not have are ignored, and missing ones take their default. Lists become tuples."""
    names = _field_names(kind)  # type: ignore[arg-type]
    known = {name: value for name, value in record.items() if name in names}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in known.items()})


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))
