"""What an upgrade keeps, and what it refuses because Kubernetes could not do it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from support.chart import CHANGED, REPLICAS, FakeApiServer, declare, needs_helm, one, render, run_helm

pytestmark = needs_helm
SCALED = (
    "--set=rollout.autoscaling.enabled=true,rollout.autoscaling.prometheusUrl=http://prometheus:9090",
    "--set=gateway.autoscaling.enabled=true",
)
EXTERNAL = "--set=redis.enabled=false,externalRedis.url=redis://r"
NAMES = ("reinforcement-learning-of-the-large-team", "reinforcement-learning-of-the-small-team", "short")
declare(SCALED, values="no-gpu")
declare(*((EXTERNAL, f"--set=fullnameOverride={name}") for name in NAMES))


@pytest.fixture
def cluster() -> Iterator[FakeApiServer]:
    with FakeApiServer.started() as server:
        yield server


def test_autoscaling_starts_with_the_servers_that_there_are(cluster: FakeApiServer) -> None:
    """Helm removes `replicas` from an object whose new manifest lacks it, and Kubernetes then sets 1."""
    before = render(f"--set={REPLICAS}", values="no-gpu")
    cluster.store(one(before, "StatefulSet", "rollout"))
    cluster.store(one(before, "Deployment"))
    after = render(*cluster.arguments, *SCALED, values="no-gpu", anew=True)
    assert one(after, "StatefulSet", "rollout")["spec"]["replicas"] == 7
    assert one(after, "Deployment")["spec"]["replicas"] == 3
    alone = render(*SCALED, values="no-gpu")
    assert "replicas" not in one(alone, "StatefulSet", "rollout")["spec"], (
        "a new release starts with what its scaler says"
    )


def test_the_storage_of_redis_is_not_changed_by_an_upgrade(cluster: FakeApiServer) -> None:
    redis = one(render(values="no-gpu"), "StatefulSet", "redis")
    cluster.store(redis)
    assert run_helm("template", *cluster.arguments, values="no-gpu").returncode == 0
    refused = run_helm("template", *cluster.arguments, "--set=redis.storage.size=3Gi", values="no-gpu").stderr
    assert (
        "redis.storage.size is 3Gi and the release has 2Gi" in refused
        and "patch pvc data-test-penstock-redis-0" in refused
    )
    del redis["spec"]["podManagementPolicy"]
    refused = run_helm("template", *cluster.arguments, values="no-gpu").stderr
    assert "delete statefulset test-penstock-redis --cascade=orphan" in refused


def test_redis_is_replaced_by_a_rollback_and_stopped_last() -> None:
    manifests = render(*CHANGED)
    spec = one(manifests, "StatefulSet", "redis")["spec"]
    assert spec["podManagementPolicy"] == "Parallel", "otherwise a broken pod is never replaced"
    pod = spec["template"]["spec"]
    shell, script, run, limit_s = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, script, run) == ("/bin/sh", "/etc/redis/wait-for-clients.sh", "r1")
    assert 400 < int(limit_s) < pod["terminationGracePeriodSeconds"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    scripts = one(manifests, "ConfigMap", "-redis")["data"]
    assert mounts["scripts"] == "/etc/redis" and scripts["wait-for-clients.sh"].startswith("#!/bin/sh")


def test_two_long_names_stay_apart() -> None:
    def name_of(release: str) -> str:
        result = run_helm("template", EXTERNAL, f"--set=fullnameOverride={release}")
        assert result.returncode == 0, result.stderr
        [name] = set(re.findall(r"^  name: (\S+)-gateway$", result.stdout, re.M))
        return name

    one_team, other_team, short = map(name_of, NAMES)
    assert one_team != other_team and one_team.startswith("reinforcement-learning")
    assert max(len(one_team), len(other_team)) <= 32
    assert short == "short"
