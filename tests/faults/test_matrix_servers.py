"""Rows of the fault matrix: what happens to rollout servers."""

from __future__ import annotations

import contextlib
import time

import pytest
import redis

from penstock.machine import free_port
from penstock.store.fleet import SERVING_STATES
from penstock.store.keys import RunKeys
from support.faults.matrix_run import FaultFree, MatrixRun
from support.faults.proxy import ProxyThread
from support.fixtures import MakeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
AREA = "rollout servers"


def current(run: MatrixRun) -> int:
    stat = run.stat()
    assert stat is not None
    return stat.policy_version


def served_digests(run: MatrixRun) -> set[str]:
    return {server.weights_digest for server in run.servers().values()}


def check_learner_was_left_alone(run: MatrixRun) -> None:
    stat = run.stat()
    assert stat is not None and stat.term == 1 and "learner" not in run.measured.restarts


@pytest.mark.fault_row(
    AREA, "kill -9 in mid-generation", how="SIGKILL to one of two servers, three times at seeded moments",
    must="its leases are re-issued, it returns, the learner never stops",
)  # fmt: skip
def test_a_server_is_killed_in_mid_generation(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run(seed=1)
    run.start_all()
    for _ in range(3):
        run.until_more_steps(run.random.randint(1, 2))
        version = current(run)
        run.fault()
        run.kill("b")
        run.until_serving("b", above=version)
        run.recovered()
    stat = run.stat()
    assert stat is not None and stat.reclaimed > 0, "it died with prompts"
    run.stop_and_check(fault_free)
    check_learner_was_left_alone(run)
    assert run.measured.restarts == {"b": 3}


@pytest.mark.fault_row(
    "weights", "torn push", how="SIGKILL to a server as soon as its state is LOADING, three times",
    must="the others get the version; the killed one returns with a whole one",
)  # fmt: skip
def test_a_server_is_killed_in_a_push(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run(weights={"transport": "gloo", "bucket_bytes": 2**18, "ready_timeout_s": 4, "push_timeout_s": 8})
    run.start_all()
    states = RunKeys(run.config.run).server_states
    for _ in range(3):
        version = current(run)
        with contextlib.closing(redis.Redis.from_url(run.redis.url)) as client:
            end = time.monotonic() + 60
            while client.hget(states, "b") != b"LOADING":
                assert time.monotonic() < end, run.report("no push to b")
        run.fault()
        run.kill("b")
        run.until_serving("a", "b", above=version)
        run.recovered()
        run.until(lambda: served_digests(run) <= run.published_digests(), "weights that are those of a version")
    run.stop_and_check(fault_free)
    check_learner_was_left_alone(run)


@pytest.mark.fault_row(
    AREA, "hangs", how="SIGSTOP, then SIGCONT", must="evicted; the others get every version; it returns with the newest"
)
def test_a_server_hangs_and_wakes_up(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    run.fault()
    run.parts["b"].stop()
    run.until(lambda: run.servers()["b"].state == "EVICTED", "b to be evicted")
    version = current(run)
    run.until_serving("a", above=version)
    run.recovered()
    run.until_more_steps(2)
    assert run.servers()["b"].state == "EVICTED"
    version = current(run)
    run.parts["b"].go_on()
    run.until_serving("b", above=version - 1)
    run.until_more_steps(2)
    run.stop_and_check(fault_free)
    check_learner_was_left_alone(run)


@pytest.mark.fault_row(
    AREA, "a new one joins", how="a third server is started in mid-run",
    must="it gets the current version and serves; nothing is restarted",
)  # fmt: skip
def test_a_new_server_joins(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    version = current(run)
    run.fault()
    run.start("c")
    run.until_serving("c", above=version - 1)
    run.recovered()
    run.until(lambda: run.servers()["c"].running_groups > 0, "c to lease prompts")
    run.until_more_steps(2)
    run.stop_and_check(fault_free)
    check_learner_was_left_alone(run)
    assert run.measured.restarts == {}


@pytest.mark.fault_row(
    AREA, "is stopped in order", how="SIGTERM, then a new start",
    must="it gives its prompts back: no lease expires and no attempt is lost",
)  # fmt: skip
def test_a_server_is_terminated(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    version = current(run)
    run.fault()
    terminated = run.parts["b"]
    terminated.process.terminate()
    run.until(lambda: terminated.process.poll() is not None, "b to end")
    assert terminated.process.returncode == 0
    run.until_serving("b", above=version)
    run.recovered()
    run.until_more_steps(2)
    run.stop_and_check(fault_free)
    stat = run.stat()
    assert stat is not None and stat.reclaimed == 0
    check_learner_was_left_alone(run)


@pytest.mark.fault_row(
    AREA, "is cut off from everything", how="black holes on its links to Redis and from the learner",
    must="training goes on without it; it catches up alone once the network is back",
)  # fmt: skip
def test_a_server_is_partitioned(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    port = free_port()
    to_redis = ProxyThread(("127.0.0.1", run.redis.port))
    to_server = ProxyThread(("127.0.0.1", port), host="127.0.0.2", port=port)
    with to_redis, to_server:
        rollout = run.config.rollout.model_copy(update={"port": port, "advertise_host": "127.0.0.2"})
        run.start_part("b", "support.faults.steady_server", run.through(to_redis, {"rollout": rollout}))
        run.start("feed", "a", "learner")
        run.until_step(3)
        run.until_serving("a", "b")
        version = current(run)
        run.fault()
        for link in (to_redis, to_server):
            link.do("black_hole")
        run.until_more_steps(3)
        run.recovered()
        for link in (to_redis, to_server):
            link.do("heal")
        run.until_serving("a", "b", above=version)
        run.until_more_steps(2)
        run.stop_and_check(fault_free)
    check_learner_was_left_alone(run)
    assert run.servers()["a"].state in SERVING_STATES
