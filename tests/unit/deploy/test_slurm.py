"""deploy/slurm/penstock.sbatch, with stand-ins for `penstock` and `srun`."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.monitoring import DEPLOY
from support.processes import until

SCRIPT = DEPLOY / "slurm" / "penstock.sbatch"
WRITES = "mkdir -p runs/my-run && touch runs/my-run/join.yaml"


def start(folder: Path, up: str, **environment: str) -> subprocess.Popen[str]:
    """Start the script of a job with two nodes. `up` is the shell script that stands in for `penstock up`."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    stand_ins = {
        "penstock": up, "hostname": "echo ::1", "srun": "echo $$ > srun.pid; exec sleep 600",
        # As Slurm's own, it may fail although it has sent the signal.
        "scancel": 'until [ -s srun.pid ]; do sleep 0.1; done; echo "$@" > scancel.log; kill "$(cat srun.pid)"; exit 1',
    }  # fmt: skip
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NAME": "my-run", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    return subprocess.Popen(
        ["bash", str(SCRIPT), "my-run.yaml"], cwd=folder, text=True, stderr=subprocess.PIPE,
        env=os.environ | job | {"SLURMD_NODENAME": "node-1"} | environment,
    )  # fmt: skip


@pytest.mark.parametrize(("up", "code"), [("exit 2", 2), (WRITES, 0), (f"{WRITES}; sleep 2; exit 3", 3)])
def test_a_job_ends_with_the_exit_status_of_the_run(tmp_path: Path, up: str, code: int) -> None:
    job = start(tmp_path, up)
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (code, "")


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_only_a_node_that_is_alone_has_servers_and_the_learner(tmp_path: Path, nodes: str) -> None:
    job = start(tmp_path, f'echo "$@" >> up.log; {WRITES}', SLURM_JOB_NUM_NODES=nodes)
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (0, "")
    assert ("--rollout.num_servers 0" in (tmp_path / "up.log").read_text()) == (nodes == "2")


def test_a_job_that_is_signalled_ends_with_the_run_and_its_servers(tmp_path: Path) -> None:
    job = start(tmp_path, f"trap 'sleep 1; exit 7' TERM; {WRITES}; touch up; while :; do sleep 0.2; done")
    until(lambda: (tmp_path / "srun.pid").exists() and (tmp_path / "up").exists(), "the other node joins", timeout_s=60)
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (7, "")
    assert (tmp_path / "scancel.log").read_text() == "--signal=TERM 7.0\n"


def test_a_job_whose_nodes_cannot_join_fails(tmp_path: Path) -> None:
    job = start(tmp_path, "trap 'exit 0' TERM; while :; do sleep 0.2; done", PENSTOCK_JOIN_WAIT_S="2")
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1 and "join.yaml in time" in errors
