"""Concurrent clients record every call while Redis and the gateway are killed: some order must explain all answers.

The short run is part of `make test`, the others of `make chaos`. PENSTOCK_LINEARIZABILITY_SEEDS=4,5 sets their seeds.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.linearizability.recorded_run import CALLS, Plan, RecordedRun

SEEDS = [int(seed) for seed in os.environ.get("PENSTOCK_LINEARIZABILITY_SEEDS", "1,2,3").split(",")]


async def check(folder: Path, plan: Plan) -> None:
    async with RecordedRun(folder, plan) as run:
        history = await run.run()
    calls = Counter(call.name for call, _ in history.calls)
    print(f"\n{plan}: {calls.total()} calls on {len(run.recorder.names)} prompts, {run.recorder.num_lost} answers lost")
    print(", ".join(f"{count} {name}" for name, count in calls.most_common()))
    problems = history.problems()
    assert not problems, f"{plan}: {len(problems)} parts of the history are wrong:\n" + "\n".join(problems[:3])
    assert run.num_poisoned > 0 and calls.keys() >= CALLS


async def test_a_short_history_is_linearizable(tmp_path: Path) -> None:
    await check(tmp_path, Plan(seed=7, duration_s=3.0, redis_kills=1, gateway_kills=0))


@pytest.mark.fault_row(
    "whole run", "linearizability, seed {seed}",
    how="clients submit, repeat, cancel, requeue, lease, append, take and commit while the gateway is killed twice and "
    "Redis four times; some submissions fail inside their script",
    must="one order of all calls explains every answer; a lost answer may have been executed or not",
)  # fmt: skip
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_history_is_linearizable(tmp_path: Path, seed: int, record_property: Any) -> None:
    await check(tmp_path, Plan(seed, duration_s=25.0, redis_kills=4, gateway_kills=2))
    record_property("fault", {"lost": 0, "doubled": 0})
