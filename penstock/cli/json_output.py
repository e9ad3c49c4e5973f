"""The output of `--json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.responses import ResponseBody


def to_json(body: ResponseBody | Sequence[ResponseBody], indent: int | None = 2) -> str:
    import json

    from penstock.client.responses import ResponseBody

    if isinstance(body, ResponseBody):
        return json.dumps(body.model_dump(mode="json"), indent=indent)
    return json.dumps([each.model_dump(mode="json") for each in body], indent=indent)
