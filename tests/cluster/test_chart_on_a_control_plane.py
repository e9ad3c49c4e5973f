"""The chart on a real control plane: what its API server admits, its controllers make and its scheduler places.

KUBEBUILDER_ASSETS=/opt/kubernetes/bin python -m pytest tests/cluster -m long
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chart import VALUES, needs_helm
from support.cluster import (
    ControlPlane,
    HollowNodes,
    Manifest,
    Release,
    add_foreign_kinds,
    add_node,
    new_release,
    running_control_plane,
)
from support.processes import until

pytestmark = [needs_helm, pytest.mark.long, pytest.mark.timeout(900)]
POOLS = 10
REPLICAS = 1000


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    binaries = os.environ.get("KUBEBUILDER_ASSETS")
    if not binaries:
        pytest.skip("KUBEBUILDER_ASSETS is not set: no binaries of a control plane (docs/testing.md)")
    with running_control_plane(Path(binaries), tmp_path_factory.mktemp("control-plane")) as plane:
        add_foreign_kinds(plane)
        with plane.client() as client:
            for number in range(4):
                add_node(client, f"gpu-{number}", cpus=128, gpus=8)
            add_node(client, "cpu-0", cpus=64)
        with HollowNodes(plane) as nodes:
            yield plane
            assert nodes.error is None, nodes.error


@pytest.fixture
def release(plane: ControlPlane) -> Release:
    return new_release(plane)


def component(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"].get("app.kubernetes.io/component"))


def identities(pods: dict[str, Manifest], kind: str) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in pods.items() if component(pod) == kind}


@pytest.mark.parametrize("values", VALUES)
def test_every_pod_is_admitted_and_placed(release: Release, values: str) -> None:
    release.upgrade(values)
    pods = release.wait_for_pods()
    assert {"gateway", "redis", "rollout"} <= {component(pod) for pod in pods.values()}
    assert all(pod["status"]["phase"] == "Running" for pod in pods.values())
    warned = [event["message"] for event in release.objects("events") if event.get("reason") == "FailedCreate"]
    assert not warned


def test_a_learning_rate_restarts_the_learner_alone(release: Release) -> None:
    release.upgrade("no-gpu")
    before = release.wait_for_pods()
    release.upgrade("no-gpu", "--set=config.learner.lr=2e-4")
    after = release.wait_for_pods()
    for kept in ("gateway", "redis", "rollout"):
        assert identities(after, kept) == identities(before, kept) != {}
    assert identities(after, "learner") != identities(before, "learner")


def test_a_rollback_heals_redis(release: Release) -> None:
    release.upgrade("no-gpu")
    release.wait_for_pods()
    release.upgrade("no-gpu", "--set=images.redis.tag=broken")

    def is_broken() -> bool:
        redis = [pod for pod in release.pods().values() if component(pod) == "redis"]
        return any(pod["status"]["phase"] == "Pending" for pod in redis)

    until(is_broken, "a Redis that cannot start")
    release.helm("rollback", release.name)
    pods = release.wait_for_pods()
    [redis] = [pod for pod in pods.values() if component(pod) == "redis"]
    assert "broken" not in redis["spec"]["containers"][0]["image"]


def test_autoscaling_keeps_the_servers_that_run(release: Release) -> None:
    release.upgrade("standalone", "--set=rollout.replicas=3")
    before = release.wait_for_pods()
    prometheus = "--set=rollout.autoscaling.enabled=true,rollout.autoscaling.prometheusUrl=http://prometheus:9090"
    release.upgrade("standalone", "--set=rollout.replicas=3", prometheus)
    after = release.wait_for_pods()
    assert set(identities(after, "rollout")) == set(identities(before, "rollout"))


def test_a_thousand_servers_in_ten_pools(
    release: Release, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    with plane.client() as client:
        for number in range(REPLICAS // 8):
            add_node(client, f"pool-{number}", cpus=256, gpus=8)
    pools = [{"name": f"p{number}", "replicas": REPLICAS // POOLS} for number in range(POOLS)]
    begun = time.monotonic()
    release.upgrade("standalone", f"--set-json=rollout.pools={json.dumps(pools)}")
    applied_s = time.monotonic() - begun
    pods = release.wait_for_pods(timeout_s=800)
    placed_s = time.monotonic() - begun
    servers = [pod for pod in pods.values() if component(pod) == "rollout"]
    assert len(servers) == REPLICAS
    sizes = {
        one["kind"] + "/" + one["metadata"]["name"]: len(json.dumps(one))
        for kind in ("statefulsets", "configmaps", "secrets", "services", "networkpolicies")
        for one in release.objects(kind)
    }
    largest = max(sizes, key=lambda name: sizes[name])
    with capsys.disabled():
        print(
            f"\n{REPLICAS} servers in {POOLS} pools: applied in {applied_s:.1f} s, all ready in {placed_s:.1f} s; "
            f"{len(sizes)} objects of {sum(sizes.values()):,} bytes, the largest {largest} with {sizes[largest]:,}; "
            f"{len(json.dumps(servers[0])):,} bytes a pod"
        )
    assert sizes[largest] < 512 * 1024, "an object near the limit of etcd, 1.5 MB"
