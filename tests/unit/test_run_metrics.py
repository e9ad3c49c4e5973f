"""Metrics of a run: who paused it, what it waits for, whether it learns, and its memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.replay import queue
from penstock.store.fleet import Orders
from penstock.store.redis_client import RedisMemory
from penstock_services.gateway.metrics import RunCollector, RunSnapshot
from support.run_facts import STAT, run_facts

STEP = {"reward_mean": 0.2, "zero_advantage_group_ratio": 1.0, "step_s": 10.0, "wait_s": 1.0, "update_s": 9.0}
FACTS = run_facts([STEP] * 12, stat=replace(STAT, step=12))


def collected(name: str, **changes: Any) -> dict[str, float]:
    """Value of each series of a metric by its label."""
    collector = RunCollector()
    memory = changes.pop("redis_memory", None)
    collector.snapshot = RunSnapshot(replace(FACTS, **changes), redis_memory=memory)
    samples = [sample for family in collector.collect() for sample in family.samples if sample.name == name]
    return {next(iter(sample.labels.values()), ""): sample.value for sample in samples}


@pytest.mark.parametrize(
    ("is_paused", "reason", "paused"),
    [
        (False, "", {"operator": 0, "run": 0}),
        (True, "", {"operator": 1, "run": 0}),
        (True, "all rewards of step 3 failed", {"operator": 0, "run": 1}),
    ],
)
def test_who_paused_a_run(is_paused: bool, reason: str, paused: dict[str, float]) -> None:
    changes = {"orders": Orders(is_paused=is_paused), "pause_reason": reason}
    assert collected("penstock_run_paused", **changes) == paused


def test_one_finding_applies_and_its_value_is_its_level() -> None:
    speed, learning = collected("penstock_run_speed"), collected("penstock_run_learning")
    assert {finding: level for finding, level in speed.items() if level} == {"learner": 1}
    assert {finding: level for finding, level in learning.items() if level} == {"no_spread": 3}
    assert "solved" in learning and "kv_full" in speed, "a finding that does not apply is 0"


def test_every_reason_to_drop_a_group_starts_at_0() -> None:
    scripts = [path.read_text() for path in (Path(queue.__file__).parent / "lua").glob("*.lua")]
    by_scripts = {reason for text in scripts for reason in re.findall(r"'HINCRBY', EXPIRED_REASONS, '(\w+)'", text)}
    expected = {"stale", "no_spread", "pass_rate", "too_long", "quarantined", "reward_failed", "remainder"} | by_scripts
    assert by_scripts == {"cancelled", "abandoned"} and collected("penstock_expired_total") == dict.fromkeys(
        expected, 0
    )


def test_rewinds_and_the_memory_of_redis() -> None:
    assert collected("penstock_rewinds_total", orders=Orders(num_rewinds=2)) == {"": 2}
    assert collected("penstock_redis_memory_used_bytes") == {}, "without INFO there is no series"
    memory = {"redis_memory": RedisMemory(5, 9)}
    assert collected("penstock_redis_memory_used_bytes", **memory) == {"": 5}
    assert collected("penstock_redis_memory_limit_bytes", **memory) == {"": 9}
