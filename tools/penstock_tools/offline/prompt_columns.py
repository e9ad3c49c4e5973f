"""Converts the prompts of a dataset to Parquet columns in verl's schema, so that the answers can be scored later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.trajectory import Prompt

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def prompt_columns(prompts: Sequence[Prompt]) -> dict[str, Any]:
    has_fields = any(prompt.message_fields for prompt in prompts)
    return {
        "prompt": pa.array([prompt.chat for prompt in prompts], None if has_fields else pa.list_(MESSAGE)),
        "data_source": pa.array([prompt.data_source for prompt in prompts], pa.string()),
        "reward_model": json_column([{"ground_truth": prompt.ground_truth} for prompt in prompts]),
        "extra_info": json_column([prompt.extra_info for prompt in prompts]),
        "agent_name": pa.array([prompt.agent_name for prompt in prompts], pa.string()),
    }


def json_column(values: Sequence[Any]) -> Any:
    """An Arrow column of JSON values. Objects become structs. Values that share no Arrow type become JSON text."""
    if any(isinstance(value, dict) for value in values) and all(isinstance(v, dict | None) for v in values):
        return _struct_column(values)
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError):
        column = None
    if column is None or _holds_objects(column.type):
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in values], pa.string())
    return column


def _struct_column(values: Sequence[dict[str, Any] | None]) -> Any:
    keys = list(dict.fromkeys(key for value in values if value for key in value))
    if not keys:
        return pa.nulls(len(values))  # Parquet has no struct without fields
    columns = [json_column([value.get(key) if value else None for value in values]) for key in keys]
    return pa.StructArray.from_arrays(columns, names=keys, mask=pa.array([value is None for value in values]))


def _holds_objects(kind: Any) -> bool:
    """Whether the type contains objects. Their fields may be missing or empty, so they are written as JSON text."""
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_struct(kind))
