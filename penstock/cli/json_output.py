"""Answers as JSON, as `--json` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.client.answers import Answer


def to_json(answer: Answer | Sequence[Answer], indent: int | None = 2) -> str:
    import json

    from penstock.client.answers import Answer

    if isinstance(answer, Answer):
        return json.dumps(answer.model_dump(mode="json"), indent=indent)
    return json.dumps([each.model_dump(mode="json") for each in answer], indent=indent)
