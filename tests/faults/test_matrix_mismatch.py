"""Rows of the fault matrix: servers whose weights are not those that they name."""

from __future__ import annotations

import pytest

from penstock.store.fleet import Quarantine, Quarantines
from support.faults.faulty_server import FILE, KIND
from support.faults.matrix_run import MatrixRun
from support.fixtures import MakeRun

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


def quarantines(run: MatrixRun) -> dict[str, Quarantine]:
    return run.ask(lambda client: Quarantines(client, run.config.run).read()) or {}


def more_steps(run: MatrixRun, more: int) -> None:
    wanted = run.step + more
    run.until(lambda: run.step >= wanted, f"step {wanted}")


@pytest.mark.parametrize("kind", ["frozen", "layer"])
@pytest.mark.fault_row(
    "weights", "a server that misses updates ({kind})",
    how="one of two servers reports every push as loaded and loads nothing of it, or all but one layer",
    must="it is in quarantine within a few steps; none of its groups is trained; it returns when it loads again",
)  # fmt: skip
def test_a_server_misses_updates(make_run: MakeRun, kind: str) -> None:
    run = make_run(learner={"lr": 3e-4, "max_logprob_mismatch_nats": 0.1}, dataset={"epochs": 100})
    fault = run.config.folder / "fault"
    run.start("feed", "learner")
    run.start_part("a", "support.faults.faulty_server")
    run.start_part("b", "support.faults.faulty_server", environment={KIND: kind, FILE: str(fault)})
    run.until_step(5)
    run.until_serving("a", "b")
    assert quarantines(run) == {}
    fault.touch()
    run.fault()
    before = run.step
    run.until(lambda: "b" in quarantines(run), "the quarantine of b", timeout_s=240)
    found = quarantines(run)
    assert found.keys() == {"b"} and found["b"].mismatch_nats > found["b"].limit_nats
    assert run.step - before <= 40, "samples are up to two steps old, and some steps change little"
    run.until(lambda: quarantines(run).get("b", found["b"]).num_reloads >= 1, "b to be loaded again")
    more_steps(run, 3)
    assert "b" in quarantines(run), "it misses that load too"
    fault.unlink()
    run.until(lambda: not quarantines(run), "b to agree again", timeout_s=240)
    run.recovered()
    more_steps(run, 3)
    assert quarantines(run) == {}
    stat = run.stat()
    assert stat is not None and stat.dead_lettered == 0 and stat.expired > 0, "its groups were sampled again"
    assert "learner" not in run.measured.restarts
    run.stop_and_check(None)
