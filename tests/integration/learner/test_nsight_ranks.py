"""A private Ray starts a rank under nsys, for which a script stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from penstock_learner.roles.profiling import NSYS_OPTIONS

NSYS = """#!/bin/sh
echo "$@" > "$(dirname "$0")/arguments"
while [ "$1" = profile ] || [ "${1#--}" != "$1" ]; do shift; done
"$@"
echo > "$(dirname "$0")/report"
"""
PROGRAM = """
import json, os, sys
from pathlib import Path

from penstock.config.loading import validate
from penstock_learner.__main__ import prepare_environment

profile = {"tool": "nsight", "steps": [1]}
data = {"model": {"path": "none"}, "run_dir": sys.argv[1], "learner": {"profile": profile}}
config = validate(data, "test").changed({"learner.policy.gpus_per_rank": 0})
prepare_environment(config)
import psutil
import ray
from penstock_learner.roles.profiling import runtime_environment
from penstock_learner.roles.ray_cluster import ray_cluster

class Rank:
    def started_by(self):
        parent = psutil.Process().parent()
        return sys.executable, parent.cmdline()[1], parent.pid

policy = config.learner.policy.model_copy(update={"gpus_per_rank": 1})
with ray_cluster(config, config.learner.needed_roles):
    options = runtime_environment(config, "policy", policy, 0)
    rank = ray.remote(Rank).options(num_cpus=0, **options).remote()
    *executables, pid = ray.get(rank.started_by.remote(), timeout=100)
    print(json.dumps(executables))
    nsys = psutil.Process(pid)
    ray.kill(rank)
    psutil.wait_procs([nsys], timeout=100)
"""


def test_nsys_starts_a_rank_and_outlives_it(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nsys").write_text(NSYS)
    (folder / "nsys").chmod(0o700)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [sys.executable, str(folder / "nsys")]
    assert " ".join(NSYS_OPTIONS) in (folder / "arguments").read_text()
    assert (folder / "report").exists()
