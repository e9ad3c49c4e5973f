"""Rows of the fault matrix: every link of a run is delayed, cut, half-open, a black hole, and silent in one direction.

Each test has a link, and goes through all faults, one after the other. A fault lasts longer than the deadlines of the
parts at its ends. The recovery time counts from its end.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.machine import free_port
from support.faults.matrix_run import FaultFree, MatrixRun, make_faults
from support.faults.proxy import ProxyThread
from support.faults.steady_server import STORE_FILE, STORE_VIA
from support.fixtures import MakeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
AREA = "network"


def one_more_step(run: MatrixRun) -> Callable[[], None]:
    return lambda: run.until_step(run.until(lambda: run.step + 1, "Redis to answer"))


@pytest.mark.fault_row(AREA, "learner to Redis", how="", must="the learner waits, then goes on; nothing is lost")
def test_the_learner_s_link_to_redis_fails(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    with ProxyThread(("127.0.0.1", run.redis.port)) as proxy:
        run.start("feed", "a", "b")
        run.start_part("learner", "penstock_learner", run.through(proxy))
        run.until_step(3)
        make_faults(run, proxy, "learner to Redis", one_more_step(run))
        run.stop_and_check(fault_free)


@pytest.mark.fault_row(
    AREA, "rollout server to Redis", how="", must="its leases go to others, it returns; nothing is lost"
)
def test_a_server_s_link_to_redis_fails(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    with ProxyThread(("127.0.0.1", run.redis.port)) as proxy:
        run.start("feed", "a", "learner")
        run.start_part("b", "support.faults.steady_server", run.through(proxy))
        run.until_step(3)
        run.until_serving("a", "b")
        make_faults(run, proxy, "rollout server to Redis", lambda: until_both_serve(run))
        run.stop_and_check(fault_free)


def until_both_serve(run: MatrixRun) -> None:
    """Both servers have the newest version, or one that comes after it."""
    stat = run.until(run.stat, "Redis to answer")
    assert stat is not None
    run.until_serving("a", "b", above=stat.policy_version - 1)


@pytest.mark.fault_row(
    AREA,
    "learner to rollout server (weights)",
    how="",
    must="the push goes on without it; it catches up; never a mixture",
)
def test_the_link_of_the_weight_push_fails(make_run: MakeRun, fault_free: FaultFree) -> None:
    run, port = make_run(), free_port()
    with ProxyThread(("127.0.0.1", port), host="127.0.0.2", port=port) as proxy:
        rollout = run.config.rollout.model_copy(update={"port": port, "advertise_host": "127.0.0.2"})
        config = run.config.model_copy(update={"rollout": rollout})
        run.start("feed", "a", "learner")
        run.start_part("b", "support.faults.steady_server", config)
        run.until_step(3)
        run.until_serving("a", "b")
        make_faults(run, proxy, "learner to rollout server (weights)", lambda: until_both_serve(run))
        run.stop_and_check(fault_free)
        assert "learner" not in run.measured.restarts


@pytest.mark.fault_row(
    AREA, "rendezvous of a push by gloo", how="", must="the push goes on without it; it catches up; never a mixture"
)
def test_the_link_to_the_rendezvous_fails(make_run: MakeRun, fault_free: FaultFree, tmp_path: Path) -> None:
    run = make_run(weights={"transport": "gloo", "ready_timeout_s": 4, "push_timeout_s": 8})
    told = tmp_path / "rendezvous"

    def rendezvous() -> tuple[str, int]:
        host, _, port = told.read_text().rpartition(":")
        return host, int(port)

    with ProxyThread(rendezvous) as proxy:
        environment = {STORE_VIA: str(proxy.port), STORE_FILE: str(told)}
        run.start("feed", "a", "learner")
        run.start_part("b", "support.faults.steady_server", environment=environment)
        run.until_step(3)
        run.until_serving("a", "b")
        assert proxy.proxy.num_connections > 0
        make_faults(run, proxy, "rendezvous of a push by gloo", lambda: until_both_serve(run))
        run.stop_and_check(fault_free)
        assert "learner" not in run.measured.restarts
