"""Schemas of the built-in tools, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def built_in_schema(name: str, description: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The schema of a function whose parameters are all texts. `parameters` maps their names to descriptions."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in parameters.items()},
                "required": list(parameters),
            },
        },
    }
