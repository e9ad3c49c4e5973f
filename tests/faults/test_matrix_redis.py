"""Rows of the fault matrix: what happens to Redis."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
import redis

from penstock.replay.queue_types import QueueStat
from support.faults.matrix_run import FaultFree, MatrixRun
from support.faults.proxy import LostReplies, ProxyThread
from support.fixtures import MakeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
AREA = "Redis"
DOWN_S = 5.0
"""Longer than the deadline of a command and than a lease, shorter than the learner's patience."""


def stat_of(run: MatrixRun) -> QueueStat:
    return run.until(run.stat, "Redis to answer")  # type: ignore[return-value]


@pytest.mark.fault_row(
    AREA, "kill -9 and restart", how=f"SIGKILL twice; {DOWN_S:g} s later it is started again", must="0 lost, 0 twice"
)
def test_redis_is_killed(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run(seed=2)
    run.start_all()
    for _ in range(2):
        run.until_more_steps(run.random.randint(1, 3))
        step = run.step
        run.fault()
        run.redis.kill()
        run.pause(DOWN_S)
        run.redis.start()
        run.until_step(step + 1)
        run.recovered()
    run.until_more_steps(2)
    run.stop_and_check(fault_free)


@pytest.mark.fault_row(
    AREA, "AOF tail cut", how="SIGKILL; up to one second of writes is cut from the log, three times",
    must="0 lost, 0 trained twice",
)  # fmt: skip
def test_redis_loses_its_tail(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run(seed=3, replay={"loss_window_s": 1.25})
    run.start_all()
    cut = 0
    for _ in range(3):
        run.until_more_steps(run.random.randint(1, 2))
        step = run.step
        run.fault()
        run.redis.sample()
        run.redis.kill()
        cut += run.redis.cut_tail()
        run.redis.start()
        run.until_step(step + 1)
        run.recovered()
    assert cut > 0
    run.stop_and_check(fault_free)


@pytest.mark.fault_row(
    AREA, "hangs", how=f"SIGSTOP for {DOWN_S:g} s, then SIGCONT", must="every wait ends; the run goes on; 0 lost"
)
def test_redis_hangs(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    step = run.step
    run.fault()
    assert run.redis.process is not None
    run.redis.process.send_signal(signal.SIGSTOP)
    time.sleep(DOWN_S)
    run.redis.process.send_signal(signal.SIGCONT)
    run.until_step(step + 1)
    run.recovered()
    run.until_more_steps(2)
    run.stop_and_check(fault_free)


@pytest.mark.fault_row(
    AREA, "out of memory", how="maxmemory is set to what is used", must="producers pause, and go on once there is room"
)
def test_redis_is_out_of_memory(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    with contextlib.closing(redis.Redis.from_url(run.redis.url)) as client:
        used = int(client.info("memory")["used_memory"])
        run.fault()
        client.config_set("maxmemory", used // 2)
        run.until(lambda: "cannot append" in run.log("a") or "cannot lease" in run.log("a"), "a to pause")
        run.pause(DOWN_S)
        client.config_set("maxmemory", 0)
        step = run.step
        run.until_step(step + 2)
        run.recovered()
    run.stop_and_check(fault_free)
    assert not run.measured.restarts.keys() & {"a", "b"}, "the producers wait"


@pytest.mark.fault_row(
    AREA, "replies to appends are lost", how="a proxy forwards every third append and drops the reply",
    must="the group is trained once",
)  # fmt: skip
def test_replies_to_appends_are_lost(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    with ProxyThread(("127.0.0.1", run.redis.port), lost_replies=LostReplies(b":group:", 0.33, 5)) as proxy:
        run.fault()
        run.start_part("a", "support.faults.steady_server", run.through(proxy))
        run.start("feed", "b", "learner")
        run.until(lambda: proxy.proxy.num_lost >= 5, "five lost replies", timeout_s=240)
        step = run.step
        run.until_step(step + 2)
        run.stop_and_check(fault_free)
        run.measured.recovery_s = None
