"""The output of `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.api.records import Record


def to_json(body: Record | Sequence[Record], indent: int | None = 2) -> str:
    import json

    from penstock.api.records import Record

    if isinstance(body, Record):
        return json.dumps(body.model_dump(mode="json"), indent=indent)
    return json.dumps([each.model_dump(mode="json") for each in body], indent=indent)
