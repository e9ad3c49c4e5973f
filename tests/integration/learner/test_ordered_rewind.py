"""A real fleet and learner that generate and train while the gateway rewinds, releases, pins and stops them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest

from penstock.cli.commands.feed import TERMINATED
from penstock.client.address import GatewayAddress
from penstock.config.dataset import DatasetConfig
from penstock.store.fleet import PolicyRegistry, RunControl
from penstock.v1 import policies_pb2
from penstock_learner.checkpoints import CheckpointStore
from support.fleet_runs import EXAMPLE, FleetRun, Part, fleet_config
from support.redis_server import RedisProcess

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    response = http.post(path, json=body or None)
    assert response.status_code == 200, response.text
    return response.json()


def start_gateway(run: FleetRun, request: pytest.FixtureRequest) -> tuple[Part, httpx.Client]:
    """The gateway and a client of it, which is closed when the test ends."""
    gateway = run._start("gateway", "penstock_services.gateway")
    run.until((run.config.folder / "gateway.json").exists, "the gateway")
    address = GatewayAddress.from_run_dir(run.config.folder)
    http = httpx.Client(base_url=address.url, headers=address.headers, timeout=60, trust_env=False)
    request.addfinalizer(http.close)
    return gateway, http


def oldest_published(run: FleetRun) -> int:
    """The oldest version that was published. Versions that are superseded at once are skipped."""
    return min(version for version in run.policies() if version > 0)


def rewound_to(run: FleetRun, version: int) -> policies_pb2.Policy | None:
    """The new version that has exactly the weights of an older one. The learner rewinds once."""
    policies = run.policies()
    found = [
        policy
        for policy in policies.values()
        if policy.parent_version == version and policy.weights_digest == policies[version].weights_digest
    ]
    assert len(found) <= 1
    return found[0] if found else None


def test_a_learner_that_was_away_follows_the_rewind_when_it_is_back(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "back-later")
    with FleetRun(config, redis_process.url) as run:
        run.start_server("a", "--rollout.engine.name", "torch")
        learner = run.start_learner()
        checkpoints = CheckpointStore(config.folder / "checkpoints", keep=1)

        def checkpointed() -> list[int]:
            """Published versions that have a checkpoint and are not the newest."""
            return [version for version in run.policies() if checkpoints.of_version(version) and version < run.current]

        version = run.until(checkpointed, "a version of a checkpoint", timeout_s=240)[0]
        learner.kill()
        control = lambda client: RunControl(client, config.run)  # noqa: E731
        run.ask(lambda client: control(client).hold(version))
        run.ask(lambda client: control(client).release())
        again = run.start_learner()
        rewound = run.until(lambda: rewound_to(run, version), f"the learner to rewind to version {version}")
        assert f"rewound to version {version}, from" in again.output() and "checkpoints/term-" in again.output()
        run.until_serving("a", above=rewound.policy_version - 1)
        oldest = oldest_published(run)
        assert checkpoints.of_version(oldest) is None
        run.ask(lambda client: control(client).hold(oldest))
        run.ask(lambda client: control(client).release())
        run.until(lambda: rewound_to(run, oldest), f"the learner to rewind to version {oldest}, of no checkpoint")
        assert "the optimizer starts from zero" in again.output()
        assert not any(run.watch.conservation_errors)


def test_a_learner_that_waits_for_groups_in_the_place_of_those_it_dropped_hears_that_it_is_to_stop(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "waiting")
    # Room for one more batch besides those that are published, trained and read ahead.
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"max_staleness": 4})})
    with FleetRun(config, redis_process.url) as run:
        server = run.start_server("a", "--rollout.engine.name", "torch")
        learner = run.start_learner()
        run.until_serving("a", above=4, timeout_s=240)
        learner.stop()
        num_groups = config.replay.groups_per_step
        run.until(lambda: run.stat().queued - run.stat().delivered >= num_groups, "a batch after the one read ahead")
        server.stop()
        version = oldest_published(run)
        run.ask(lambda client: RunControl(client, config.run).hold(version))
        learner.go_on()
        run.until(lambda: rewound_to(run, version), f"the learner to rewind to version {version}")
        run.until(lambda: run.stat().queued == run.stat().delivered, "all groups to be trained or dropped")
        assert run.stat().expired >= 2 * num_groups, "the batch that was read ahead too"
        learner.may_end = True
        run.ask(lambda client: RunControl(client, config.run).stop())
        run.until(lambda: learner.process.poll() is not None, "the learner to stop, before its batch's deadline")
        assert learner.process.returncode == 0, learner.output()[-2000:]
        assert not any(run.watch.conservation_errors)


def test_servers_return_to_a_version_and_leave_it_again(
    tmp_path: Path, redis_process: RedisProcess, request: pytest.FixtureRequest
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "rewound")
    with FleetRun(config, redis_process.url) as run:
        run.start_server("a", "--rollout.engine.name", "torch")
        run.start_learner("--learner.policy.num_ranks", "2", "--learner.policy.cpus_per_rank", "0.5")
        gateway, http = start_gateway(run, request)
        run.until_serving("a", above=3, timeout_s=240)
        policies, version = f"/v1/runs/{config.run}/policies", oldest_published(run)
        held = post(http, f"{policies}/{version}:rewind")
        assert held["is_held"] and held["snapshot_path"]
        before = run.current
        said_again = post(http, f"{policies}/{version}:rewind")
        assert said_again == held | {"server_ids": ANY}, "once, however often it is ordered"
        run.until(lambda: run.servers()["a"].policy_version == version, f"the server to return to version {version}")
        run.until_serving("a", above=version - 1)
        rewound = run.until(lambda: rewound_to(run, version), f"the learner to rewind to version {version}")
        assert rewound.policy_version > before
        published = run.current
        run.until(lambda: run.current > max(published, rewound.policy_version) + 2, "the learner to go on")
        assert rewound_to(run, version) == rewound, "it rewound once"
        assert run.stat().expired > 0, "groups of the versions between are dropped, and their prompts answered anew"
        assert run.servers()["a"].policy_version == version, "nothing is pushed meanwhile"
        body = {"model": config.run, "messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
        assert post(http, "/v1/chat/completions", **body)["policy_version"] == version

        post(http, f"{policies}:release")
        run.until_serving("a", above=published)
        learner = run.parts["learner"]
        learner.may_end = True
        assert post(http, f"/v1/runs/{config.run}:stop")["state"] == "STOPPED"
        run.until(lambda: learner.process.poll() is not None, "the learner to stop")
        assert learner.process.returncode == 0, learner.output()[-2000:]
        assert not any(run.watch.conservation_errors)
        gateway.may_end = True


def test_a_version_is_evaluated_by_a_pinned_server_while_the_others_train(
    tmp_path: Path, redis_process: RedisProcess, request: pytest.FixtureRequest
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "pinned")
    with FleetRun(config, redis_process.url) as run:
        for server_id in ("a", "b"):
            run.start_server(server_id, "--rollout.engine.name", "torch")
        run.start_learner()
        _, http = start_gateway(run, request)
        run.until_serving("a", "b", above=3, timeout_s=240)
        pins, evaluations = f"/v1/runs/{config.run}/pins", f"/v1/runs/{config.run}/evaluations"
        version = oldest_published(run)
        for name in ("b", "nightly"):
            pinned = http.put(f"{pins}/{name}", json={"policy_version": version})
            pinned.raise_for_status()
        run.until(lambda: run.servers()["b"].policy_version == version, f"the server to return to version {version}")
        run.until_serving("b", above=version - 1)
        sums = [{"role": "user", "content": f"{n}+{n}="} for n in range(10, 30)]
        prompts = [{"messages": [one], "sampling": {"max_tokens": 8}, "num_samples": 2} for one in sums]
        started_at = run.current
        post(http, evaluations, evaluation_id="nightly", prompts=prompts)

        def result() -> Any:
            return http.get(f"{evaluations}/nightly").json()

        run.until(lambda: result()["num_finished"] == len(prompts), "the evaluation")
        assert (result()["policy_version_min"], result()["policy_version_max"]) == (version, version)
        evaluated_at_ms, evaluated_at = 1000 * time.time(), run.current
        run.until(lambda: run.current > evaluated_at + 2, "training to go on")
        assert run.servers()["b"].policy_version == version < run.servers()["a"].policy_version
        assert run.watch.groups_of("a", evaluated_at_ms) and not run.watch.groups_of("b", evaluated_at_ms)
        http.delete(f"{pins}/b").raise_for_status()
        run.until_serving("b", above=started_at)
        assert not any(run.watch.conservation_errors)


def test_a_validation_is_of_one_version_while_the_other_server_trains(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    config = fleet_config(tmp_path, redis_process.url, "validated")
    validation = {"file": EXAMPLE / "heldout.parquet", "every_steps": 4, "num_samples": 4, "max_tokens": 8}
    config = config.model_copy(
        update={
            "dataset": DatasetConfig.model_validate({"validation": validation}),
            "rollout": config.rollout.model_copy(update={"num_servers": 2}),
        }
    )
    results = config.folder / "validation.jsonl"

    def lines() -> list[dict[str, Any]]:
        return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []

    with FleetRun(config, redis_process.url) as run:
        feed = run._start("feed", "penstock.cli.commands.feed")
        for server_id in ("a", "b"):
            run.start_server(server_id, "--rollout.engine.name", "torch")
        run.start_learner()
        run.until(lambda: len(lines()) >= 3, "three validations", timeout_s=300)
        for line in lines():
            assert line["policy_version_min"] == line["policy_version_max"]
        assert lines()[-1]["policy_version_min"] > 0
        pins = lambda: run.ask(lambda client: PolicyRegistry(client, config.run).pins())  # noqa: E731
        [held] = run.until(lambda: set(pins()) & {"a", "b"}, "a server to be held")
        version, [other] = pins()[held], {"a", "b"} - {held}
        run.until(lambda: run.servers()[other].policy_version > version, "training to go on")
        feed.may_end = True
        feed.process.terminate()
        assert feed.process.wait(30) == TERMINATED and pins() == {}
        run.until_serving("a", "b", above=version)
        assert not any(run.watch.conservation_errors)
