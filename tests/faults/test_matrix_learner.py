"""Rows of the fault matrix: what happens to the learner, its ranks, and Ray."""

from __future__ import annotations

import contextlib
import re
import signal

import psutil
import pytest

from support.faults.matrix_run import FaultFree, MatrixRun
from support.fixtures import MakeRun
from support.processes import is_alive

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
AREA = "learner"
TWO_RANKS = {"policy": {"num_ranks": 2, "cpus_per_rank": 0.5}}


def until_new_term(run: MatrixRun, term: int) -> None:
    """Wait until a learner of a later term has trained a step."""

    def has_trained() -> bool:
        stat = run.stat()
        return stat is not None and stat.term > term

    run.until(has_trained, f"a term after {term}", timeout_s=240)
    run.until_more_steps(1, timeout_s=240)


def term_of(run: MatrixRun) -> int:
    stat = run.stat()
    assert stat is not None
    return stat.term


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(
            seed,
            marks=pytest.mark.fault_row(
                AREA, f"kill -9, seed {seed}", how="SIGKILL to the controller at a seeded moment, twice",
                must="the next learner ends in the state of the run without faults",
            ),
        )
        for seed in range(3)
    ],
)  # fmt: skip
def test_a_learner_is_killed_at_any_moment(make_run: MakeRun, fault_free: FaultFree, seed: int) -> None:
    run = make_run(seed=seed)
    run.start_all()
    for _ in range(2):
        run.until_more_steps(run.random.randint(1, 4))
        run.pause(run.random.uniform(0, 0.5))
        term = term_of(run)
        run.fault()
        run.kill("learner")
        until_new_term(run, term)
        run.recovered()
    run.stop_and_check(fault_free)
    assert run.measured.restarts == {"learner": 2}


@pytest.mark.fault_row(
    AREA, "is stopped in order", how="SIGTERM, then a new start",
    must="it ends with a checkpoint of everything it trained; no step is trained again",
)  # fmt: skip
def test_a_learner_is_terminated(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    term, learner = term_of(run), run.parts["learner"]
    run.fault()
    learner.process.terminate()
    run.until(lambda: learner.process.poll() is not None, "the learner to end")
    assert learner.process.returncode == 0, learner.output()[-2000:]
    before = run.step
    assert run.newest_checkpoint()[0] == before
    run.start("learner")
    until_new_term(run, term)
    run.recovered()
    run.stop_and_check(fault_free)
    assert f"step {before} version" not in run.parts["learner"].output(), "no step is trained again"


@pytest.mark.fault_row(
    AREA, "zombie", how="SIGSTOP, a second learner takes over, SIGCONT",
    must="the first is fenced: it cannot commit, acknowledge or publish, and ends",
)  # fmt: skip
def test_a_learner_hangs_and_wakes_up_after_another_took_over(make_run: MakeRun, fault_free: FaultFree) -> None:
    run = make_run()
    run.start_all()
    zombie, term = run.parts["learner"], term_of(run)
    run.fault()
    zombie.stop()
    zombie.may_end = True
    run.start("learner")
    until_new_term(run, term)
    run.recovered()
    zombie.go_on()
    run.until(lambda: zombie.process.poll() is not None, "the first learner to end")
    assert zombie.process.returncode not in (0, None)
    assert "has passed" in run.log("learner")
    run.until_more_steps(2)
    run.stop_and_check(fault_free)
    assert term_of(run) == term + 1


def signalled_rank(run: MatrixRun, number: signal.Signals) -> psutil.Process:
    ranks = run.until(lambda: run.ranks("Policy"), "the policy's ranks")
    assert len(ranks) == 2, ranks
    chosen = run.random.choice(ranks)
    chosen.send_signal(number)
    return chosen


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            signal.SIGKILL,
            marks=pytest.mark.fault_row(
                AREA, "a rank dies", how="SIGKILL to one of two FSDP ranks",
                must="all ranks rewind to the checkpoint; no partial commit",
            ),
        ),
        pytest.param(
            signal.SIGSTOP,
            marks=pytest.mark.fault_row(
                AREA, "a rank hangs", how="SIGSTOP to one of two FSDP ranks; rank_timeout_s is 15",
                must="the rank is replaced after its deadline; no partial commit",
            ),
        ),
    ],
)  # fmt: skip
def test_a_rank_fails(make_run: MakeRun, fault_free_of_two_ranks: FaultFree, number: signal.Signals) -> None:
    run = make_run(learner=TWO_RANKS | {"rank_timeout_s": 15})
    run.start_all()
    term = term_of(run)
    run.fault()
    failed = signalled_rank(run, number)
    until_new_term(run, term)
    run.recovered()
    assert not is_alive(failed)
    run.until_more_steps(2)
    run.stop_and_check(fault_free_of_two_ranks)
    assert "learner" not in run.measured.restarts, "the controller stays"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=pytest.mark.fault_row(
                AREA, f"Ray's {name} dies", how=f"SIGKILL to {name}",
                must="the learner ends with one line of ours, and its successor goes on from the checkpoint",
            ),
        )
        for name in ("gcs_server", "raylet")
    ],
)  # fmt: skip
def test_ray_fails(make_run: MakeRun, fault_free: FaultFree, name: str) -> None:
    run = make_run(learner={"rank_timeout_s": 15})
    run.start_all()
    term, learner = term_of(run), run.parts["learner"]
    [found] = [process for process in learner.tree() if program_of(process) == name]
    run.fault()
    found.kill()
    until_new_term(run, term)
    run.recovered()
    run.until_more_steps(2)
    run.stop_and_check(fault_free)
    assert f"penstock learner: error: Ray's {name} has ended" in run.log("learner")


def program_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
        return re.sub(r".*/", "", process.cmdline()[0])
    return ""
