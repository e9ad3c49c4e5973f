"""`helm uninstall` with the processes and the files of the rendered chart: all of them are stopped at the same moment,
and Redis leaves last."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from penstock.machine import free_port, wait_for_port
from penstock_tools.local.private_redis import find_redis_server
from support.chart import FILES, PodFolder, needs_helm, one, processes, render
from support.processes import until

pytestmark = [needs_helm, pytest.mark.long, pytest.mark.timeout(900)]
HERE = "127.0.0.1"
OVERRIDES = {
    "rollout": (
        "--rollout.engine.name=torch",
        f"--rollout.host={HERE}",
        "--rollout.port=0",
        "--rollout.metrics_port=0",
    ),
    "learner": (f"--learner.publish_host={HERE}", f"--learner.metrics_host={HERE}", "--learner.metrics_port=0"),
    "feed": (f"--dataset.metrics_host={HERE}", "--dataset.metrics_port=0"),
}
"""The pods have addresses of their own, and the image has vLLM."""
SMALL = (
    "--set=config.learner.policy.num_ranks=1,config.learner.algorithm.kl.placement=none,config.replay.groups_per_step=4"
)


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Redis with the chart's files. All roles have the password of the rendered pods."""
    scripts = one(render(SMALL, values="no-gpu"), "ConfigMap", "-redis")["data"]
    folder, port = tmp_path / "redis", free_port()
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name).write_text(text)
    for role in ("gateway", "rollout", "learner"):
        (folder / f"redis-{role}-password").write_text(FILES["redis/password"])
    words = ["sh", str(folder / "start.sh"), str(folder / "users.acl"), str(tmp_path), str(folder)]
    settings = ["--port", str(port), "--bind", HERE, "--dir", str(folder), "--save", ""]
    environment = os.environ | {"REDIS_SERVER": find_redis_server()}
    process = subprocess.Popen([*words, *settings], env=environment, stdout=subprocess.DEVNULL)
    assert wait_for_port(HERE, port, timeout_s=20)
    yield process, port
    process.kill()
    process.wait(timeout=20)


def test_the_learner_ends_well_when_everything_is_stopped_at_once(
    redis_process: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    server, port = redis_process
    manifests = render(SMALL, values="no-gpu")
    (tmp_path / "pods").mkdir()
    pod = PodFolder(tmp_path / "pods", manifests)
    started = {}
    for name, words in OVERRIDES.items():
        command = pod.command(processes(manifests)[name], *words, f"--redis.url=redis://localhost:{port}/0")
        with (tmp_path / f"{name}.log").open("w") as log:
            started[name] = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        password = FILES["redis/password"].strip()
        with redis.Redis(HERE, port, username="learner", password=password) as client:

            def step() -> int:
                assert all(process.poll() is None for process in started.values()), _logs(tmp_path)
                return int(client.hget("penstock:{run}:counters", "step") or 0)

            until(lambda: step() >= 2, "two steps", timeout_s=600)
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        hook = one(manifests, "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"][0]["lifecycle"][
            "preStop"
        ]
        _, _, run, limit_s = hook["exec"]["command"]
        environment = os.environ | {"PATH": f"{Path(find_redis_server()).parent}:{os.environ['PATH']}"}
        script = ["sh", str(tmp_path / "redis" / "wait-for-clients.sh"), run, limit_s, "-p", str(port)]
        subprocess.run(script, env=environment, check=True, timeout=int(limit_s))
        assert started["rollout"].poll() is not None or started["rollout"].wait(timeout=60) == 0
        server.terminate()
        codes = {name: process.wait(timeout=120) for name, process in started.items()}
        assert codes["learner"] == 0 and codes["rollout"] == 0, f"{codes}\n{_logs(tmp_path)}"
        assert "does not answer" not in (tmp_path / "learner.log").read_text(), "Redis was there until the end"
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=20)


def _logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.glob("*.log"))
