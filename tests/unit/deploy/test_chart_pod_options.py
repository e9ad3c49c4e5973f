"""Every workload takes every pod option, and the API accepts the result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.chart import (
    CHANGED,
    DIGEST,
    FURTHER_OPTIONS,
    OPTIONS,
    Manifest,
    needs_helm,
    of_kind,
    one,
    pod_templates,
    render,
)  # fmt: skip

pytestmark = needs_helm
NEWEST = "1.35"
DEFAULTS = {
    "podLabels": {"team": "rl", "app.kubernetes.io/name": "not-mine"},
    "podAnnotations": {"prometheus.io/scrape": "false"},
    "serviceAccountName": "robot",
    "runtimeClassName": "nvidia",
    "schedulerName": "kai-scheduler",
    "priorityClassName": "research",
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}]}},
    "topologySpreadConstraints": [{"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
    "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "extraVolumes": [{"name": "scratch", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    "initContainers": [{"name": "before", "image": "busybox", "command": ["true"]}],
    "sidecars": [{"name": "beside", "image": "busybox", "command": ["sleep", "1d"]}],
    "resourceClaims": [{"name": "nics", "resourceClaimTemplateName": "rdma"}],
    "extraResources": {"limits": {"rdma/hca": 1, "ephemeral-storage": "10Gi"}},
    "podSpec": {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["proxy"]}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    """All workloads, with every option as a default."""
    file = tmp_path_factory.mktemp("options") / "values.json"
    pools = [{"name": "one"}, {"name": "wide", "nodes": 2, "gpus": 1, "engine": {"tensor_parallel_size": 2}}]
    model = {"source": "org/model", "into": "claim"}
    file.write_text(json.dumps({"podDefaults": DEFAULTS, "rollout": {"pools": pools}, "modelDownload": model}))
    return render(*OPTIONS, f"--values={file}")


def templates(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates of workloads. The test hook has none of the options."""
    return {name: template for name, template in pod_templates(manifests) if not name.endswith("-test")}


def test_every_workload_takes_every_option(everything: list[Manifest]) -> None:
    found = templates(everything)
    parts = ("gateway", "rollout-one", "rollout-wide/leader", "rollout-wide/worker", "-learner-", "ray/head",
             "ray/policy", "ray/reference", "-feed-", "redis", "-model-")  # fmt: skip
    assert len(found) == len(parts) and all([name for name in found if part in name] for part in parts)
    for name, template in found.items():
        spec, main = template["spec"], template["spec"]["containers"][0]
        labels = template["metadata"]["labels"]
        assert labels["team"] == "rl" and labels["app.kubernetes.io/name"] == "penstock", name
        assert template["metadata"]["annotations"]["prometheus.io/scrape"] == "false", name
        for field in ("serviceAccountName", "runtimeClassName", "schedulerName", "priorityClassName", "affinity"):
            assert spec[field] == DEFAULTS[field], f"{name} {field}"
        assert spec["nodeSelector"]["zone"] == "a" and spec["tolerations"], name
        assert spec["topologySpreadConstraints"][-1]["topologyKey"] == "rack", name
        assert DEFAULTS["env"][0] in main["env"] and main["envFrom"] == DEFAULTS["envFrom"], name  # type: ignore[index]
        assert {"name": "scratch", "emptyDir": {}} in spec["volumes"], name
        assert {"name": "scratch", "mountPath": "/scratch"} in main["volumeMounts"], name
        assert spec["resourceClaims"][0]["name"] == main["resources"]["claims"][0]["name"] == "nics", name
        assert main["resources"]["limits"]["rdma/hca"] == 1 and main["resources"]["limits"]["memory"], name
        assert spec["hostAliases"] == [{"ip": "10.0.0.1", "hostnames": ["proxy"]}], name
        containers = {c["name"]: c for c in [*spec["containers"], *spec["initContainers"]]}
        assert containers["before"]["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
        ends = spec.get("restartPolicy") == "OnFailure"
        assert ("restartPolicy" in containers["beside"]) == ends, "a Job would not end before its sidecar"
        assert (containers["beside"] in spec["initContainers"]) == ends, name


def test_kubernetes_takes_the_options(everything: list[Manifest]) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for name, template in templates(everything).items():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"} | template["metadata"]}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, NEWEST, strict=True), name


def test_a_workload_s_own_option_wins_and_mappings_are_merged() -> None:
    manifests = render(*CHANGED)
    rollout = one(manifests, "StatefulSet", "rollout")["spec"]["template"]["spec"]
    assert rollout["priorityClassName"] == "high" and rollout["nodeSelector"] == {"zone": "a", "gpu": "h200"}
    assert rollout["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    redis = one(manifests, "StatefulSet", "redis")["spec"]["template"]
    assert redis["spec"]["priorityClassName"] == "low"
    assert {"team": "rl", "tier": "store"}.items() <= redis["metadata"]["labels"].items()


def test_images_come_from_a_registry_and_are_pinned_by_digest() -> None:
    manifests = render(*CHANGED)
    images = {c["name"]: c["image"] for _, t in pod_templates(manifests) for c in t["spec"]["containers"]}
    assert images["gateway"] == "reg.example.org/team/penstock/services:0.1.0"
    assert images["rollout"] == "reg.example.org/team/penstock/rollout-vllm:v9"
    assert images["learner"] == images["ray-worker"] == f"reg.example.org/team/penstock/learner@{DIGEST}"
    assert images["redis"].startswith("redis:")


def test_pods_have_the_identity_of_their_account() -> None:
    manifests = render(*FURTHER_OPTIONS)
    account = one(manifests, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/runs"}
    assert {t["spec"]["serviceAccountName"] for _, t in pod_templates(manifests)} == {account["metadata"]["name"]}
    yours = render(*CHANGED)
    assert not of_kind(yours, "ServiceAccount")
    assert {t["spec"]["serviceAccountName"] for _, t in pod_templates(yours)} == {"mine"}


def test_the_token_of_the_hub_is_a_file_for_pods_that_load_models_or_data() -> None:
    manifests = render(*FURTHER_OPTIONS)
    with_token = set()
    for name, template in pod_templates(manifests):
        for container in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]:
            assert "HF_TOKEN" not in {v["name"] for v in container.get("env", [])}, name
            paths = [v["value"] for v in container.get("env", []) if v["name"] == "HF_TOKEN_PATH"]
            mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
            assert [str(Path(mounts["huggingface"]) / "token")] == paths if paths else "huggingface" not in mounts, name
            if paths:
                with_token.add(container["name"])
                [secret] = [v["secret"] for v in template["spec"]["volumes"] if v["name"] == "huggingface"]
                assert secret["secretName"] == "hub" and secret["items"] == [{"key": "read", "path": "token"}]
    assert with_token == {"rollout", "learner", "ray-worker", "feed", "model", "download"}


def test_a_secret_of_the_csi_driver_is_mounted_by_every_pod_with_keys() -> None:
    manifests = render(*CHANGED)
    for name, template in pod_templates(manifests):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        if "keys" in volumes:
            assert volumes["secret-provider"]["csi"]["volumeAttributes"] == {"secretProviderClass": "vault"}, name
            mounts = [mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]]
            assert "secret-provider" in mounts, name
