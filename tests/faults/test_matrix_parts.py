"""A row of the fault matrix: each part of a run is killed once."""

from __future__ import annotations

import pytest

from support.fixtures import MakeRun


@pytest.mark.fault_row(
    "whole run", "every part is killed once", how="SIGKILL to the feed, a server, Redis and the learner, one by one",
    must="each returns; nothing is lost or trained twice",
)  # fmt: skip
@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_every_part_of_a_run_is_killed_once(make_run: MakeRun) -> None:
    run = make_run(sample_s=0.4, seed=8)
    run.start("feed", "a", "learner")
    run.until_step(2)
    run.fault()
    run.kill("feed")
    run.kill("a")
    run.redis.kill()
    run.redis.start()
    run.until_more_steps(2, timeout_s=240)
    run.kill("learner")
    stat = run.until(run.stat, "Redis to answer")
    assert stat is not None
    run.until(lambda: (now := run.stat()) is not None and now.term > stat.term, "a new term", timeout_s=240)
    run.until_more_steps(2, timeout_s=240)
    run.recovered()
    run.stop_and_check(None)
    assert run.measured.restarts.keys() >= {"a", "learner"}
