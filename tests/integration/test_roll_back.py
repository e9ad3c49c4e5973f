"""A real fleet and its learner, rolled back, released, pinned and stopped by the gateway; it generates meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from conftest import RedisProcess
from fleet_runs import FleetRun, Part, fleet_config
from penstock.rest_calls import GatewayAddress
from penstock.run_control import RunControl
from penstock.v1 import policies_pb2

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


def post(url: str, path: str, **body: Any) -> Any:
    response = httpx.post(f"{url}{path}", json=body or None, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    return response.json()


def start_gateway(run: FleetRun) -> tuple[Part, str]:
    """And its address."""
    gateway = run._start("gateway", "penstock_services.gateway")
    run.until((run.config.folder / "gateway.json").exists, "the gateway")
    return gateway, GatewayAddress.from_run_dir(run.config.folder).url


def returned_to(run: FleetRun, version: int) -> policies_pb2.Policy | None:
    """The version that the learner made of an older one's weights."""
    found = [p for p in run.policies().values() if p.parent_version == version and p.policy_version > version + 1]
    return found[-1] if found else None


def test_a_learner_that_was_away_follows_the_roll_back_when_it_is_back(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "back-later")
    with FleetRun(config, redis_process.url) as run:
        run.start_server("a", "--rollout.engine.name", "torch")
        learner = run.start_learner()
        run.until(lambda: run.current > 11, "a checkpoint, of version 10", timeout_s=240)
        learner.kill()
        control = lambda client: RunControl(client, config.run)  # noqa: E731
        run.ask(lambda client: control(client).hold(10))
        run.ask(lambda client: control(client).release())
        again = run.start_learner()
        returned = run.until(lambda: returned_to(run, 10), "the learner to return to version 10", timeout_s=240)
        assert returned.weights_digest == run.policies()[10].weights_digest
        assert "rolled back to version 10, from" in again.output() and "checkpoints/term-" in again.output()
        run.until_serving("a", above=returned.policy_version - 1)
        run.ask(lambda client: control(client).hold(3))
        run.ask(lambda client: control(client).release())
        again_returned = run.until(lambda: returned_to(run, 3), "the learner to return to version 3, of no checkpoint")
        assert again_returned.weights_digest == run.policies()[3].weights_digest
        assert "the optimizer begins anew" in again.output()
        assert not any(run.watch.conservation_errors)


def test_a_learner_that_waits_for_groups_in_the_place_of_those_it_dropped_hears_that_it_is_to_stop(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "waiting")
    # Room for another batch beside those that are published, trained and read ahead.
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"max_staleness": 4})})
    with FleetRun(config, redis_process.url) as run:
        server = run.start_server("a", "--rollout.engine.name", "torch")
        learner = run.start_learner()
        run.until_serving("a", above=4, timeout_s=240)
        learner.stop()
        num_groups = config.replay.groups_per_step
        run.until(lambda: run.stat().queued - run.stat().delivered >= num_groups, "a batch after the one read ahead")
        server.stop()
        run.ask(lambda client: RunControl(client, config.run).hold(2))
        learner.go_on()
        run.until(lambda: returned_to(run, 2), "the learner to return to version 2")
        run.until(lambda: run.stat().queued == run.stat().delivered, "all groups to be trained or dropped")
        assert run.stat().expired >= 2 * num_groups, "the batch that was read ahead too"
        learner.may_end = True
        run.ask(lambda client: RunControl(client, config.run).stop())
        run.until(lambda: learner.process.poll() is not None, "the learner to stop, before its batch's deadline")
        assert learner.process.returncode == 0, learner.output()[-2000:]
        assert not any(run.watch.conservation_errors)


def test_servers_return_to_a_version_and_leave_it_again(tmp_path: Path, redis_process: RedisProcess) -> None:
    config = fleet_config(tmp_path, redis_process.url, "rolled-back")
    with FleetRun(config, redis_process.url) as run:
        run.start_server("a", "--rollout.engine.name", "torch")
        run.start_learner("--learner.policy.num_ranks", "2", "--learner.policy.cpus_per_rank", "0.5")
        gateway, url = start_gateway(run)
        run.until_serving("a", above=3, timeout_s=240)
        policies = f"/v1/runs/{config.run}/policies"
        held = post(url, f"{policies}/2:rollback")
        assert held["is_held"] and held["snapshot_path"]
        before = run.current
        assert post(url, f"{policies}/2:rollback") == held | {"server_ids": ANY}, "once, however often it is said"
        run.until(lambda: run.servers()["a"].policy_version == 2, "the server to return to version 2")
        run.until_serving("a", above=1)
        returned = run.until(lambda: returned_to(run, 2), "the learner to return to version 2")
        assert returned.policy_version > before
        assert returned.weights_digest == run.policies()[2].weights_digest, "every byte of it"
        published = run.current
        run.until(lambda: run.current > max(published, returned.policy_version) + 2, "the learner to go on")
        children = {p.policy_version for p in run.policies().values() if p.parent_version == 2}
        assert children <= {3, returned.policy_version}, "it went back once"
        assert run.stat().expired > 0, "groups of the versions between are dropped, and their prompts answered anew"
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


def test_a_version_is_evaluated_by_a_pinned_server_while_the_others_train(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "pinned")
    with FleetRun(config, redis_process.url) as run:
        for server_id in ("a", "b"):
            run.start_server(server_id, "--rollout.engine.name", "torch")
        run.start_learner()
        _, url = start_gateway(run)
        run.until_serving("a", "b", above=3, timeout_s=240)
        pins, evaluations = f"{url}/v1/runs/{config.run}/pins", f"/v1/runs/{config.run}/evaluations"
        for name in ("b", "nightly"):
            httpx.put(f"{pins}/{name}", json={"policy_version": 2}, timeout=60, trust_env=False).raise_for_status()
        run.until(lambda: run.servers()["b"].policy_version == 2, "the server to return to version 2")
        run.until_serving("b", above=1)
        sums = [{"role": "user", "content": f"{n}+{n}="} for n in range(10, 30)]
        prompts = [{"messages": [one], "sampling": {"max_tokens": 8}, "num_samples": 2} for one in sums]
        started_at = run.current
        post(url, evaluations, evaluation_id="nightly", prompts=prompts)

        def result() -> Any:
            return httpx.get(f"{url}{evaluations}/nightly", timeout=60, trust_env=False).json()

        run.until(lambda: result()["num_finished"] == len(prompts), "the evaluation")
        assert (result()["policy_version_min"], result()["policy_version_max"]) == (2, 2)
        evaluated_at_ms, evaluated_at = 1000 * time.time(), run.current
        run.until(lambda: run.current > evaluated_at + 2, "training to go on")
        assert run.servers()["b"].policy_version == 2 and run.servers()["a"].policy_version > 2
        assert run.watch.groups_of("a", evaluated_at_ms) and not run.watch.groups_of("b", evaluated_at_ms)
        httpx.delete(f"{pins}/b", timeout=60, trust_env=False).raise_for_status()
        run.until_serving("b", above=started_at)
        assert not any(run.watch.conservation_errors)
