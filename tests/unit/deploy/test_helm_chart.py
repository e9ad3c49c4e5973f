"""The chart as a whole: helm lints it, it refuses wrong values by name, and the processes can load its config."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.chart import (
    CHART,
    PLACEMENTS,
    ROOT,
    VALUES,
    further,
    needs_helm,
    one,
    refusal,
    render,
    run_config,
    run_helm,
)  # fmt: skip

pytestmark = needs_helm


@pytest.mark.parametrize("values", [None, "standalone", *further(*VALUES[1:])])
def test_lints(values: str | None) -> None:
    result = run_helm("lint", "--strict", values=values)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_run_config_is_one_that_the_processes_load(placement: str, tmp_path: Path) -> None:
    config = run_config(render(values=placement), tmp_path)
    assert config.learner.placement == placement
    assert config.redis.url == "redis://test-penstock-redis:6379/0"
    assert config.gateway.host == "0.0.0.0" and config.gateway.api_key_file is not None
    assert config.weights.cluster_key_file is not None


WRONG_TYPES = {
    "gateway.replicas=three": "gateway.replicas: Invalid type. Expected: integer",
    "config.learner.lr=fast": "config.learner.lr: Does not match",
    "config.learner.placement=split": "config.learner.placement: config.learner.placement must be one of",
    "images.redis.digest=abc": "images.redis.digest: Does not match",
    "learner.gang.scheduler=volcanoe": "learner.gang.scheduler: learner.gang.scheduler must be one of",
    "monitoring.interval=15": "monitoring.interval: Invalid type. Expected: string",
    "rollout.maxUnavailable=0": "rollout.maxUnavailable: Must be greater than or equal to 1",
    "rollout.pools[0].name=A_b": "rollout.pools.0.name: Does not match",
    "rollout.pools[1].gpus=1": "rollout.pools.1: name is required",
    "config.rollout.reward.default.knd=gsm8k": "config.rollout.reward.default: Must validate one and only one schema",
    "rollout.shmSize=8 GB": "rollout.shmSize: Does not match",
}
"""Helm lists all that its schema refuses, so one call refuses them all. A call takes seconds where helm is emulated."""
UNKNOWN = {
    "gatway.replicas=3": "gatway is not a value of the chart; did you mean gateway?",
    "gateway.podLabel.a=b": "gateway.podLabel is not a value of the chart; did you mean gateway.podLabels?",
    "rollout.replica=3": "rollout.replica is not a value of the chart; did you mean rollout.replicas?",
    "rollout.pools[0].name=a,rollout.pools[0].engine.nme=vllm": "rollout.pools[0].engine.nme is not a value of the "
    "chart; did you mean rollout.pools[0].engine.name?",
    "config.learner.lrr=0.1": "config.learner.lrr is not a value of the chart; did you mean config.learner.lr?",
    "config.learner.roles.t.worker=a:B,config.learner.roles.t.pth=/models/t": "config.learner.roles.t.pth is "
    "not a value of the chart; did you mean config.learner.roles.t.path?",
    "config.replay.staleness=1": "config.replay.staleness is not a value of the chart; did you mean "
    "config.replay.max_staleness?",
    "config.model.device=gpu": "config.model.device is not a value of the chart; config.model has ",
    "config.extends=base.yaml": "config.extends is not a value of the chart; config has dataset, gateway, learner, ",
    "config.redis.url=redis://:secret@host": "config.redis.url is decided by the chart; remove it",
    "config.run_dir=/mine": "config.run_dir is decided by the chart; remove it",
}


def test_the_schema_refuses_each_value_of_a_wrong_type_by_name() -> None:
    refused = refusal(*(f"--set={setting}" for setting in WRONG_TYPES))
    complaints = [line.removeprefix("- ") for line in refused.splitlines() if line.startswith("- ")]
    for setting, wanted in WRONG_TYPES.items():
        assert any(complaint.startswith(wanted) for complaint in complaints), f"{setting}: {refused}"


def test_a_value_that_the_chart_lacks_is_refused_with_the_nearest_one() -> None:
    refused = refusal(*(f"--set={setting}" for setting in UNKNOWN))
    for setting, wanted in UNKNOWN.items():
        assert wanted in refused, f"{setting}: {refused}"
    assert refused.count("is not a value of the chart") == len(UNKNOWN) - 2


def test_what_kubernetes_and_users_name_is_not_a_mistake() -> None:
    free = "global.a.b=1,podDefaults.podSpec.hostAliases[0].ip=1.2.3.4,gateway.resources.limits.cpus=1,files.x=y"
    render(f"--set={free}", "--set=config.rollout.engine.extra.any_option=1,config.learner.roles.teacher.worker=a:B")


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("rollout.gpus=2", "tensor_parallel_size"),
        ("rollout.pools[0].name=a,rollout.pools[0].gpus=2", "rollout.pools[a].gpus is 2"),
        ("redis.maxMemory=6Gi", "redis.maxMemory 6Gi is not below the memory limit 6Gi"),
        ("gateway.tls.enabled=true", "gateway.tls.secretName"),
        ("rollout.autoscaling.enabled=true", "rollout.autoscaling.prometheusUrl"),
        *further(
            ("rollout.pools[0].name=a,rollout.pools[1].name=a", "two pools are called a"),
            ("rollout.pools[0].name=a,rollout.pools[0].autoscaling.enabled=true", "prometheusUrl"),
            ("rollout.nodes=2,rollout.gpus=1", "on 2 nodes"),
            ("redis.maxMemory=7G", "redis.maxMemory"),
            ("kueue.priorityClass=high", "set kueue.queueName"),
            ("kueue.queueName=q,learner.gang.scheduler=volcano", "choose one"),
            ("kueue.queueName=q,gateway.autoscaling.enabled=true", "turn gateway.autoscaling off"),
            ("secretProviderClass=vault", "set secretName"),
            ("modelDownload.source=Qwen/Qwen3-8B,config.model.path=Qwen/Qwen3-8B", "below storage.models.mountPath"),
            (
                "certManager.enabled=true,certManager.issuerRef.name=a,certManager.publicNamesOnly=true",
                "set gateway.ingress.host",
            ),
            ("redis.enabled=false", "set externalRedis.url"),
            ("redis.enabled=false,externalRedis.url=redis://u:p@host", "externalRedis.existingSecret"),
            (
                "redis.enabled=false,externalRedis.url=redis://host,externalRedis.username=u",
                "the Secret with its password",
            ),
            ("config.dataset.file=/etc/penstock/files/a.jsonl", "/etc/penstock/files/a.jsonl, which files lacks"),
            (r"files.a\.jsonl=x,config.dataset.file=/etc/penstock/files/b/a.jsonl", "b/a.jsonl, which files lacks"),
            (
                "config.learner.checkpoint.upload=s3://b/p,networkPolicy.egress.enabled=true",
                "add a rule to networkPolicy.egress.to.learner",
            ),
            ("config.dataset.file=s3://b/a.parquet", 'config names "s3://b/a.parquet", and datasets and functions are'),
            (
                "config.rollout.reward.function_file=s3://b/a.py,config.learner.checkpoint.upload=s3://b/p",
                "set storage.data.source to the folder of the object store, and name the files below /data",
            ),
            ("storage.data.source=data", "storage.data.source is data; set it to the URL"),
            ("storage.data.source=s3://b/d,storage.data.existingClaim=mine", "choose one: a source is downloaded"),
            (
                "storage.data.source=s3://b/d,networkPolicy.egress.enabled=true",
                "add rules to networkPolicy.egress.to.rollout, learner and feed",
            ),
            ("config.model.path=Qwen/Qwen3-8B", "which only one of several pods would fetch; set it to a folder below"),
            (
                "config.learner.critic.path=a/b,config.learner.critic.num_ranks=1",
                "config.learner.critic.path is a/b, which only one of several pods would fetch",
            ),
            ("learner.gang.scheduler=kueue", "set learner.gang.queue to a LocalQueue"),
            ("gateway.ingress.enabled=true", "gateway.ingress.host"),
            (
                "gateway.tls.enabled=true,gateway.tls.secretName=t,gateway.ingress.enabled=true,"
                "gateway.ingress.host=a.example.org,gateway.ingress.className=traefik",
                "by which the controller of traefik speaks HTTPS",
            ),
            (
                "gateway.tls.enabled=true,gateway.tls.secretName=t,gateway.ingress.enabled=true,"
                "gateway.ingress.host=a.example.org",
                "set gateway.ingress.tlsSecretName to a Secret with the certificate of a.example.org",
            ),
            (
                "gateway.tls.enabled=true,gateway.tls.secretName=t,gateway.httpRoute.enabled=true,"
                "gateway.httpRoute.parentRefs[0].name=edge",
                "set gateway.httpRoute.caConfigMap",
            ),
            ("gateway.httpRoute.enabled=true", "gateway.httpRoute.parentRefs"),
            ("certManager.enabled=true", "certManager.issuerRef"),
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, complaint: str) -> None:
    assert complaint in refusal("--set", setting)


def test_files_that_no_config_map_takes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "values.json").write_text(json.dumps({"files": {"a": "x" * 600_000, "b": "x" * 400_001}}))
    assert "files has 1000001 bytes" in refusal(f"--values={tmp_path / 'values.json'}")


def test_an_external_redis_replaces_the_chart_s_own(tmp_path: Path) -> None:
    external = "redis.enabled=false,externalRedis.url=rediss://redis.example.org:6380/0"
    manifests = render("--set", external)
    assert not [m for m in manifests if "redis" in m["metadata"]["name"]]
    open_redis = run_config(manifests, tmp_path).redis
    assert (open_redis.url, open_redis.password_file) == ("rediss://redis.example.org:6380/0", None)
    manifests = render("--set", f"{external},externalRedis.username=me,externalRedis.existingSecret=mine")
    gateway = one(manifests, "Deployment")["spec"]["template"]["spec"]
    assert "--redis.username=me" in gateway["containers"][0]["args"]
    [volume] = [v["secret"] for v in gateway["volumes"] if v["name"] == "redis-password"]
    assert volume["secretName"] == "mine" and volume["items"] == [{"key": "password", "path": "password"}]
    assert run_config(manifests, tmp_path).redis.password_file == Path("/etc/penstock/redis/password")


def test_the_schema_is_the_one_of_the_config_models() -> None:
    built = runpy.run_path(str(ROOT / "helm" / "make_values_schema.py"))["build"]()
    assert len(built) == 2
    for file, text in built.items():
        assert file.read_text() == text, "run: python helm/make_values_schema.py"


def test_the_chart_s_redis_files_are_those_of_deploy() -> None:
    names = ("start.sh", "wait-for-clients.sh")
    for copy, original in (("users.acl", "users.acl"), *((f"redis-{name}", name) for name in names)):
        assert (CHART / "files" / copy).read_text() == (ROOT / "deploy" / "redis" / original).read_text()


def test_the_readme_lists_exactly_the_chart_s_values() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = re.findall(r"^\| `([\w.<>]+)` \|", (CHART / "README.md").read_text(), re.M)
    assert len(rows) == len(set(rows))

    def holds(path: str, known: str) -> bool:
        return re.fullmatch(known.replace(".", r"\.").replace("<role>", r"\w+") + r"(\..+)?", path) is not None

    paths = [path for path in _paths(values) if not path.startswith("config.")]
    assert not [path for path in paths if not any(holds(path, row) for row in rows)], "values that no row names"
    assert not [row for row in rows if not any(holds(path, row) for path in _paths(values))], "rows without a value"


def _paths(value: object, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _paths(inner, f"{path}.{key}" if path else key)
    else:
        yield path
