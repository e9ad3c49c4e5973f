"""On a joined Ray cluster, the ranks outlive a controller that is killed, and its successor adopts them.

The successor ends in the state of an undisturbed run: it brings the ranks back to the checkpoint first."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.machine import free_port, wait_for_port
from support.learner_runs import fill_queue, make_config, outcome, ranks_of, run_learner
from support.redis_server import RedisProcess

KILLED = -9


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, psutil.Process]]:
    """A Ray cluster of its own: its address, and its first process."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("RAY_AUTH_MODE", "token"), ("RAY_AUTH_TOKEN", "0" * 64)):
        monkeypatch.setenv(name, value)
    port = free_port()
    # Ray's sockets need a short path (107 bytes).
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats",
                "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=4", "--include-dashboard=false",
                "--object-store-memory=100000000", f"--temp-dir={folder}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        process = psutil.Process(head.pid)
        try:
            assert wait_for_port("127.0.0.1", port, timeout_s=60)
            yield f"127.0.0.1:{port}", process
        finally:
            for started in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    started.kill()
            head.wait()


@pytest.mark.long
@pytest.mark.parametrize("crash_at", ["mid_step:4", "before_flush:2", "after_flush"])
def test_a_killed_controllers_ranks_are_adopted_and_train_nothing_twice(
    crash_at: str,
    tmp_path: Path,
    cluster: tuple[str, psutil.Process],
    tiny_models: dict[str, Path],
    redis_process: RedisProcess,
) -> None:
    address, head = cluster
    place = crash_at.replace(":", "-")
    settings: dict[str, Any] = {"policy": {"num_ranks": 2}, "checkpoint": {"every_steps": 1}}
    whole = make_config(tmp_path, tiny_models["policy"], redis_process.url, f"whole-{place}", **settings)
    asyncio.run(fill_queue(whole))
    assert run_learner(whole)[0] == 0

    config = make_config(
        tmp_path, tiny_models["policy"], redis_process.url, f"kept-{place}", ray_address=address, **settings
    )
    asyncio.run(fill_queue(config))
    code, output = run_learner(config, crash_at)
    assert code == KILLED, output[-3000:]
    kept = {process.pid for process in ranks_of("PolicyWorker", head.children(recursive=True))}
    assert len(kept) >= 2, "the ranks died with their controller"
    code, output = run_learner(config)
    assert code == 0, output[-3000:]
    assert "adopted the ranks of the policy role" in output

    recovered, undisturbed = outcome(config), outcome(whole)
    assert recovered.state_hashes == undisturbed.state_hashes
    assert recovered.ledger == undisturbed.ledger
    assert recovered.stat.trained == undisturbed.stat.trained
    _, alive = psutil.wait_procs(ranks_of("PolicyWorker", head.children(recursive=True)), timeout=20)
    assert not alive, "a learner that has finished frees its ranks"
