"""Chaos: whatever is killed, cut, suspended or unanswered, every prompt is trained exactly once.

The shortest run is part of `make test`, the others of `make chaos`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.replay.queue import RedisReplayQueue
from support.chaos.chaos_run import ChaosRun, Plan, Report
from support.chaos.processes import LOSS_WINDOW_S

STAYING_KEYS = {
    "counters",
    "trained",
    "kept_prompts",
    "policies",
    "policy_versions",
    "results",
    "submitted",
    "lease_signals",
}
MAY_STAY = {"manifests", "expired_reasons"}


def run_chaos(folder: Path, plan: Plan) -> Report:
    folder.mkdir()
    return asyncio.run(ChaosRun(folder, plan).run())


def check(plan: Plan, report: Report, undisturbed: Report) -> None:
    """Check that every prompt was trained exactly once, the end is the same as without faults, and nothing is left."""
    lost = [number for number in range(1, plan.num_groups + 1) if report.times[number] == 0]
    twice = {number: times for number, times in report.times.items() if times > 1}
    assert (lost, twice) == ([], {})
    assert sum(report.faults.values()) == plan.num_faults
    assert report.content == undisturbed.content
    assert report.times == undisturbed.times
    assert report.ledger == undisturbed.ledger == [(1, plan.num_groups)]
    assert report.stat is not None
    assert (report.stat.trained, report.stat.admitted, report.stat.queued_bytes) == (
        plan.num_groups,
        plan.num_groups,
        0,
    )
    assert report.keys - MAY_STAY == STAYING_KEYS
    assert len(report.open_manifests) <= 1, "only the batch that the learner waited for is open"
    assert report.num_samples > 0


def table(plan: Plan, report: Report) -> str:
    twice = sum(times > 1 for times in report.times.values())
    rows = [
        ("groups", plan.num_groups),
        *sorted(report.faults.items()),
        ("lost replies of appends", report.lost_replies),
        ("bytes cut from Redis' log", report.cut_bytes),
        *((f"learner stopped: {reason}", count) for reason, count in sorted(report.learner_ends.items())),
        ("redelivered", report.redelivered),
        ("reclaimed", report.reclaimed),
        ("samples of conservation, error 0", report.num_samples),
        ("longest time without a step", f"{report.longest_stall_s:.1f} s"),
        ("lost", plan.num_groups - len(report.times)),
        ("trained twice", twice),
        ("seconds", f"{report.seconds:.0f}"),
    ]
    return "\n".join(f"{name:36}{value:>10}" for name, value in rows)


def run_both(folder: Path, plan: Plan) -> Report:
    undisturbed = run_chaos(folder / "undisturbed", Plan(plan.num_groups, loss_window_s=0))
    report = run_chaos(folder / "chaos", plan)
    print(f"\n{table(plan, report)}")
    check(plan, report, undisturbed)
    return report


def measured(report: Report) -> dict[str, object]:
    """What the fault matrix shows: `check` has found that no prompt is missing or was trained twice."""
    return {"lost": 0, "doubled": 0, "recovery_s": report.longest_stall_s}


@pytest.mark.timeout(900)
def test_a_hundred_prompts_are_trained_once_whatever_dies(tmp_path: Path) -> None:
    run_both(tmp_path, Plan(num_groups=100, num_faults=4, seed=7, lost_replies=0.05))


@pytest.mark.long
@pytest.mark.fault_row(
    "whole run", "8 faults in 300 groups", how="as in the long run, with other seeds",
    must="each prompt is trained once; conservation at every moment",
)  # fmt: skip
def test_every_prompt_is_trained_once_whatever_dies(tmp_path: Path, record_property: Any) -> None:
    report = run_both(tmp_path, Plan(num_groups=300, num_faults=8, seed=7, lost_replies=0.05))
    record_property("fault", measured(report))


@pytest.mark.fault_row(
    "whole run", "60 faults in 6,000 groups", how="seeded kills, crash points, zombies, restarts of Redis, "
    "cuts of its log, lost replies; without a model", must="each prompt is trained once; conservation at every moment",
)  # fmt: skip
@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_six_thousand_prompts_are_trained_once_whatever_dies(tmp_path: Path, record_property: Any) -> None:
    report = run_both(tmp_path, Plan(num_groups=6000, num_faults=60, seed=1, lost_replies=0.02))
    record_property("fault", measured(report))


async def test_a_prompt_is_leased_once_redis_can_no_longer_lose_it(queue: RedisReplayQueue) -> None:
    """If Redis loses its tail, ids are given out again. The id of a trained prompt must not go to another prompt."""
    queue.config = queue.config.model_copy(update={"loss_window_s": 3600})
    await queue.submit([b"young"], [0], "")
    await queue.create_evaluation("young too", [b"held out"])
    assert [await queue.lease("s", 5) for _ in range(3)] == [[], [], []]
    queue.config = queue.config.model_copy(update={"loss_window_s": LOSS_WINDOW_S})
    leases = await queue.lease("s", 5)
    async with asyncio.timeout(60):
        while len(leases) < 2:
            await asyncio.sleep(0.01)
            leases += await queue.lease("s", 5)
    assert {lease.payload for lease in leases} == {b"young", b"held out"}


async def test_young_prompts_of_high_priority_do_not_hold_up_old_ones(queue: RedisReplayQueue) -> None:
    await queue.submit([b"old"], [0], "")
    assert await queue.lease("s", 0) == []
    queue.config = queue.config.model_copy(update={"loss_window_s": 60})
    await queue.submit([b"young"] * 3, [9] * 3, "")
    assert [lease.payload for lease in await queue.lease("s", 2)] == [b"old"]
