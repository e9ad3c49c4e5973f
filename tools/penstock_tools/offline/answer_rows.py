"""One row of `answers.parquet` without its prompt columns: the samples of one prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

ROW_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("responses", pa.list_(pa.string())),
        ("token_ids", pa.list_(pa.list_(pa.int32()))),
        ("log_probs", pa.list_(pa.list_(pa.float32()))),
        ("loss_masks", pa.list_(pa.list_(pa.uint8()))),
        ("finish_reasons", pa.list_(pa.string())),
        ("rewards", pa.list_(pa.float64())),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class AnswerRow:
    """All samples of one row of the dataset. The lists have one entry per sample and are empty if the row failed."""

    row: int
    """Index of the row in the dataset."""
    responses: list[str] = field(default_factory=list)
    token_ids: list[Any] = field(default_factory=list)
    log_probs: list[Any] = field(default_factory=list)
    loss_masks: list[Any] = field(default_factory=list)
    """1 for tokens that the model sampled, 0 for tokens that a tool or an interaction inserted."""
    finish_reasons: list[str] = field(default_factory=list)
    rewards: list[float] | None = None
    """None if the samples were not scored."""
    error: str | None = None
    """Why the row has no samples."""


def to_table(rows: list[AnswerRow]) -> Any:
    columns = [pa.array([getattr(row, field.name) for row in rows], field.type) for field in ROW_SCHEMA]
    return pa.Table.from_arrays(columns, schema=ROW_SCHEMA)


@dataclass
class Totals:
    """Sums over all rows on disk, written by this process or an earlier one."""

    num_samples: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    reward_sum: float = 0.0
    num_rewards: int = 0

    def add(self, table: Any) -> None:
        self.num_samples += _sum(pc.list_value_length(table["responses"]))
        self.num_tokens += _sum(pc.list_value_length(pc.list_flatten(table["token_ids"])))
        self.num_failed += pc.count(table["error"]).as_py()
        rewards = pc.list_flatten(table["rewards"])
        self.reward_sum += _sum(rewards)
        self.num_rewards += len(rewards)


def _sum(array: Any) -> Any:
    return pc.sum(array).as_py() or 0
