"""Compares the memory that `penstock plan` expects of the policy's fullest rank with what was measured on a GPU.

    PYTHONPATH=.:tools:bench python bench/plan_memory.py

It reads bench/results/learner.json (training steps of one rank) and plan_memory_parts/phases.json: peaks of ranks that
shared one H200, by model, number of ranks and phase. Versions are staged on the host. Both have the peak of torch's
allocator, which does not know the CUDA context, so the plan is compared without it.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import RESULTS, Bar, Measurement, make_parser, report
from penstock_tools.sizing.memory import CONTEXT, Phase, Setup, peak, role_memory, total
from penstock_tools.sizing.models import KNOWN, find_shape

NAME = "plan_memory"
PHASES = Path(__file__).parent / "plan_memory_parts" / "phases.json"
TOLERANCE = 0.1
_BYTES = {"float32": 4, "bfloat16": 2}
_BATCH_TOKENS = {"0.5b": 8 * 4096, "1.5b": 4 * 4096, "7b": 2 * 4096}
"""Tokens of the steps that bench/gpu/learner.py takes."""
_STEP = re.compile(r"(\S+): ours, (\w+) masters, compiled, (\d+)% recomputed, (\d+) tokens, (\d+)% kept, peak memory")


@dataclass(frozen=True)
class Row:
    """A peak that was measured."""

    model: str
    num_ranks: int
    phase: Phase
    setup: Setup
    measured_bytes: float
    note: str = ""

    @property
    def planned_bytes(self) -> float:
        """Bytes on the GPU that the plan has for it."""
        uses = role_memory("policy", find_shape(self.model), self.num_ranks, self.setup)
        return total([item for item in peak(uses, self.phase).device if item.name != CONTEXT])


def rows_of_steps(measurements: list[dict[str, Any]]) -> list[Row]:
    """Peaks of the training steps that bench/gpu/learner.py measured with one rank."""
    rows = []
    for entry in measurements:
        if found := _STEP.fullmatch(entry["name"]):
            model, masters, recomputed, tokens, kept = found.groups()
            setup = Setup(
                micro_batch_tokens=int(tokens), master_bytes=_BYTES[masters], compiles=True, staging="host",
                recomputed=int(recomputed) / 100, kept=int(kept) / 100,
                num_micro_batches=_BATCH_TOKENS[model] // int(tokens),
            )  # fmt: skip
            rows.append(Row(model, 1, "step", setup, entry["median"] * 2**30, f", {masters} masters, compiled"))
    return rows


def rows_of_phases(rows: list[dict[str, Any]]) -> list[Row]:
    """Peaks of all phases. Unknown models are made up, to try it."""
    return [
        Row(
            row["model"], row["ranks"], row["phase"],
            Setup(
                micro_batch_tokens=row["micro_batch_tokens"], master_bytes=_BYTES[row["master_dtype"]], staging="host"
            ),
            row["measured_device_bytes"],
        )
        for row in rows
        if row["model"] in KNOWN
    ]  # fmt: skip


def compare(rows: list[Row]) -> tuple[list[Measurement], list[Bar]]:
    """Measured and planned bytes of each row, and a bar for how much they differ."""
    measurements, bars = [], []
    for row in rows:
        measured, planned = row.measured_bytes, row.planned_bytes
        name = f"{row.model}, {row.num_ranks} ranks, {row.phase}{row.note}"
        measurements.append(Measurement(f"{name}: measured", "GB", [measured / 1e9]))
        measurements.append(Measurement(f"{name}: planned", "GB", [planned / 1e9]))
        print(f"{name:<52} {measured / 1e9:7.2f} GB measured {planned / 1e9:7.2f} GB planned {planned / measured:6.3f}")
        bars.append(Bar(f"{name}: planned / measured - 1", abs(planned / measured - 1), TOLERANCE, at_most=True))
    return measurements, bars


def main() -> int:
    make_parser().parse_args()
    rows = rows_of_steps(json.loads((RESULTS / "learner.json").read_text())["measurements"])
    rows += rows_of_phases(json.loads(PHASES.read_text())["rows"])
    return 0 if report(NAME, "memory of a rank, planned and measured", *compare(rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
