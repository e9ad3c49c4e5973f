"""A run that is created through a gateway is started by a launcher, stopped, resumed and finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.client import SyncPenstockClient
from penstock.client.address import GatewayAddress
from penstock.config.loading import dump_config
from support.fleet_runs import EXAMPLE, ROOT
from support.gateways import run_config
from support.processes import until
from support.redis_server import RedisProcess

LAUNCHER = ("--launcher.max_runs", "1", "--launcher.launcher_id", "here")


@contextmanager
def part(name: str, config_file: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the `penstock` command. It is ended together with all its children."""
    mark = {"PENSTOCK_TEST_PART": uuid.uuid4().hex}
    command = [sys.executable, "-m", "penstock.cli.main", name, "--config", str(config_file), *arguments]
    with (config_file.parent / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **mark}, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=120)
        finally:
            for left in psutil.process_iter(["environ"]):
                if mark.items() <= (left.info["environ"] or {}).items():
                    left.kill()


def penstock(*words: str) -> str:
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def example_config(run: str, **learner: Any) -> dict[str, Any]:
    """The arithmetic example on the torch engine."""
    return {
        "run": run,
        "model": {"path": str(EXAMPLE / "model")},
        "dataset": {"file": str(EXAMPLE / "train.parquet"), "num_samples": 4, "max_tokens": 8},
        "replay": {"groups_per_step": 4},
        "rollout": {
            "engine": {"name": "torch", "max_model_len": 64},
            "reward": {"function_file": str(EXAMPLE / "reward.py")},
        },
        "learner": {"checkpoint": {"every_steps": 5}, **learner},
    }


def client_of(folder: Path, run: str) -> SyncPenstockClient:
    address = GatewayAddress.from_run_dir(folder)
    return SyncPenstockClient(address.url, run=run, api_key=address.api_key)


@pytest.mark.timeout(400)
@pytest.mark.long  # test_launcher.py starts created runs with other processes
def test_a_created_run_is_launched_and_finished(tmp_path: Path, redis_process: RedisProcess) -> None:
    gateway_file = tmp_path / "gateway.yaml"
    gateway_file.write_text(dump_config(run_config(redis_process.url, tmp_path)))
    with part("gateway", gateway_file), part("launcher", gateway_file, *LAUNCHER):
        until((tmp_path / "test" / "gateway.json").exists, "the gateway")
        with client_of(tmp_path / "test", "short") as client:
            # The launcher may have started it before the gateway looks.
            assert client.create_run(example_config("short", num_steps=2)).state in ("CREATED", "WAITING")
            run = until(lambda: (got := client.get_run()).state == "FINISHED" and got, "the last step", timeout_s=240)
    assert (run.step, run.launcher_id, run.queue.conservation_error) == (2, "here", 0)
    assert list((tmp_path / "short" / "checkpoints").glob("term-*-step-00000002"))


@pytest.mark.long
@pytest.mark.timeout(500)
def test_a_created_run_is_launched_stopped_resumed_and_finished(tmp_path: Path, redis_process: RedisProcess) -> None:
    gateway_file, run_file = tmp_path / "gateway.yaml", tmp_path / "second.yaml"
    gateway_file.write_text(dump_config(run_config(redis_process.url, tmp_path)))
    run_file.write_text(json.dumps(example_config("second")))
    with part("gateway", gateway_file):
        folder = tmp_path / "test"
        until((folder / "gateway.json").exists, "the gateway")
        where = ("--run-dir", str(folder))
        said = penstock("runs", "create", str(run_file), *where, "--learner.num_steps", "30")
        assert said.startswith("run second is created at step 0") and "penstock launcher" in said
        address = GatewayAddress.from_run_dir(folder)
        with client_of(folder, "second") as client:
            with part("launcher", gateway_file, *LAUNCHER):
                until(lambda: client.get_run().step >= 3, "steps")
                run = client.get_run()
                assert (run.state, run.launcher_id) == ("RUNNING", "here")
                assert [server.server_id for server in client.servers()] == ["rollout-0"]
                assert "second@" in json.dumps([model["id"] for model in models(address)])
                assert completion(address, "second")["policy_version"] >= 0
                client.stop_run()
                stopped = until(lambda: (got := client.get_run()).detail == "" and got, "its processes to end")
                assert not (tmp_path / "second" / "gateway.json").exists()
                assert stopped.state == "STOPPED" and stopped.step < 30
                assert "resum" not in (tmp_path / "second" / "logs" / "learner.log").read_text()
                penstock("runs", "resume", "--run", "second", *where)
                until(lambda: client.get_run().step > stopped.step, "it to go on")
            assert (client.get_run().state, client.get_run().launcher_id) == ("STOPPED", "here")
            with part("launcher", gateway_file, *LAUNCHER):
                until(lambda: client.get_run().state == "FINISHED", "the last step", timeout_s=240)
            assert client.get_run().step == 30
            assert client.get_run().queue.conservation_error == 0
            assert "resuming from" in (tmp_path / "second" / "logs" / "learner.log").read_text()


def completion(address: GatewayAddress, model: str) -> dict[str, Any]:
    import httpx

    body = {"model": model, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
    answer = httpx.post(
        f"{address.url}/v1/chat/completions", json=body, headers=address.headers, timeout=60, trust_env=False
    )
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def models(address: GatewayAddress) -> list[dict[str, Any]]:
    import httpx

    return list(httpx.get(f"{address.url}/v1/models", headers=address.headers, trust_env=False).json()["data"])


def test_a_run_that_cannot_start_fails_with_its_reason(tmp_path: Path, redis_process: RedisProcess) -> None:
    gateway_file = tmp_path / "gateway.yaml"
    gateway_file.write_text(dump_config(run_config(redis_process.url, tmp_path)))
    with part("gateway", gateway_file), part("launcher", gateway_file, "--launcher.max_runs", "1"):
        until((tmp_path / "test" / "gateway.json").exists, "the gateway")
        with client_of(tmp_path / "test", "lost") as client:
            client.create_run({"run": "lost", "model": {"path": "/nowhere"}})
            run = until(lambda: (got := client.get_run()).state == "FAILED" and got, "the failure")
    assert "/nowhere is not a model folder" in run.detail
    assert (tmp_path / "_launcher" / "lost.log").exists()
