"""When Ray dies, the learner ends with one line of its own. Ordinary processes stand for Ray's."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from penstock.config.loading import validate
from penstock.config.run import RunConfig
from penstock.errors import RayDied, RoleDied
from penstock_learner import __main__ as learner_main
from penstock_learner.roles import ray_cluster as ray_cluster_module
from penstock_learner.roles.ray_cluster import own_processes, ray_cluster, run_watched, watch_address, watch_processes


@pytest.fixture
def gcs_server() -> Iterator[subprocess.Popen[bytes]]:
    """A child that has the name of Ray's gcs_server in its command line. It waits for its input to end."""
    child = subprocess.Popen(["/ray/gcs_server", "-c", "read line"], executable="/bin/sh", stdin=subprocess.PIPE)
    yield child
    child.kill()
    child.communicate()


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_dead_process_of_ray_ends_the_work(gcs_server: subprocess.Popen[bytes]) -> None:
    watched = own_processes()
    assert watched == {"gcs_server": psutil.Process(gcs_server.pid)}
    running = asyncio.create_task(run_watched(forever(), watch_processes(watched)))
    await asyncio.sleep(0.05)
    assert not running.done()
    gcs_server.kill()
    with pytest.raises(RayDied, match="^Ray's gcs_server has ended.*start the learner again"):
        async with asyncio.timeout(60):
            await running


async def test_the_death_of_ray_explains_the_death_of_its_ranks(gcs_server: subprocess.Popen[bytes]) -> None:
    async def fail() -> None:
        gcs_server.kill()
        raise RoleDied("policy", "a rank of the policy role died in update")

    with pytest.raises(RayDied):
        await run_watched(fail(), watch_processes(own_processes()))


async def test_other_errors_and_results_pass(gcs_server: subprocess.Popen[bytes]) -> None:
    async def fail() -> None:
        raise RoleDied("policy", "a rank of the policy role died in update")

    with pytest.raises(RoleDied):
        await run_watched(fail(), watch_processes(own_processes()))
    await run_watched(asyncio.sleep(0), watch_processes(own_processes()))


async def test_the_gcs_of_a_joined_cluster_may_be_away_for_a_while() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    watching = asyncio.create_task(watch_address(address, unreachable_s=1.0))
    await asyncio.sleep(1.5)
    assert not watching.done()
    server.close()
    await server.wait_closed()
    with pytest.raises(RayDied, match=f"^Ray's gcs at {address} has not been reachable.*learner.ray_address"):
        async with asyncio.timeout(60):
            await watching


@pytest.mark.parametrize("has_died", [False, True])
def test_a_dead_ray_is_not_shut_down_in_order(monkeypatch: pytest.MonkeyPatch, has_died: bool) -> None:
    calls: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: calls.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray_cluster_module, "kill_own_processes", lambda: calls.append("kill"))
    config = make_config()
    try:
        with ray_cluster(config, config.learner.needed_roles):
            if has_died:
                raise RayDied("Ray's raylet has ended")
    except RayDied:
        assert has_died
    assert calls == ["init", "kill" if has_died else "shutdown"]


def test_the_learner_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def serve(_: RunConfig) -> None:
        raise RayDied("Ray's raylet has ended")

    exits: list[int] = []
    monkeypatch.setattr(learner_main, "serve", serve)
    monkeypatch.setattr(learner_main, "os", SimpleNamespace(_exit=exits.append))
    before = os.umask(0o022)
    try:
        (tmp_path / "run.yaml").write_text(f"run: test\nrun_dir: {tmp_path}\nmodel: {{path: {tmp_path}}}\n")
        learner_main.main(["--config", str(tmp_path / "run.yaml")])
    finally:
        os.umask(before)
    assert exits == [1], "no exit handler of Ray runs"
    assert capfd.readouterr().err.splitlines()[-1] == "penstock learner: error: Ray's raylet has ended"


def make_config() -> RunConfig:
    return validate({"run": "test", "model": {"path": "model"}}, "test")
