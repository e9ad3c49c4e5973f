"""A real fleet that is rolled back, released and stopped through the gateway, and generates meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import RedisProcess
from fleet_runs import FleetRun, fleet_config

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


def post(url: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{url}{path}", json=body or None, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def test_servers_return_to_a_version_and_leave_it_again(tmp_path: Path, redis_process: RedisProcess) -> None:
    config = fleet_config(tmp_path, redis_process.url, "rolled-back")
    with FleetRun(config, redis_process.url) as run:
        run.start_server("a", "--rollout.engine.name", "torch")
        run.start_learner()
        gateway = run._start("gateway", "penstock_services.gateway")
        address = run.config.folder / "gateway.json"
        run.until(address.exists, "the gateway")
        from penstock.rest_calls import GatewayAddress

        url = GatewayAddress.from_run_dir(run.config.folder).url
        run.until_serving("a", above=3, timeout_s=240)
        policies = f"/v1/runs/{config.run}/policies"
        held = post(url, f"{policies}/2:rollback")
        assert held["is_held"] and held["snapshot_path"]
        run.until(lambda: run.servers()["a"].policy_version == 2, "the server to return to version 2")
        run.until_serving("a", above=1)
        published = run.current
        run.until(lambda: run.current > published + 2, "the learner to go on")
        assert run.servers()["a"].policy_version == 2, "nothing is pushed meanwhile"
        body = {"model": config.run, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
        assert post(url, "/v1/chat/completions", **body)["policy_version"] == 2

        post(url, f"{policies}:release")
        run.until_serving("a", above=published)
        learner = run.parts["learner"]
        learner.may_end = True
        assert post(url, f"/v1/runs/{config.run}:stop")["state"] == "STOPPED"
        run.until(lambda: learner.process.poll() is not None, "the learner to stop")
        assert learner.process.returncode == 0, learner.output()[-2000:]
        assert not any(run.watch.conservation_errors)
        gateway.may_end = True
