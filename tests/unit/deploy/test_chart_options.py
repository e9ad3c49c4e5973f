"""Optional parts of the chart are only installed on request, and two versions of Kubernetes accept all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rendered_chart import (
    CHART,
    OPTIONS,
    ROOT,
    VALUES,
    Manifest,
    needs_helm,
    of_kind,
    one,
    pod_templates,
    render,
    run_config,
)

pytestmark = needs_helm
KUBERNETES = ("1.29", "1.35")
OPERATORS = {
    "ray.io": "RayCluster",
    "keda.sh": "ScaledObject",
    "monitoring.coreos.com": "ServiceMonitor",
    "cert-manager.io": "Certificate",
    "gateway.networking.k8s.io": "HTTPRoute",
}
"""A kind of each API group of custom resources, whose schemas belong to their operators."""
BUILT_IN_GROUPS = {"", "apps", "autoscaling", "batch", "networking.k8s.io", "policy"}


def group_of(manifest: Manifest) -> str:
    group, slash, _ = manifest["apiVersion"].partition("/")
    return group if slash else ""


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", VALUES)
def test_kubernetes_takes_every_manifest(values: str, version: str) -> None:
    """Validate strictly: a field that the version does not have is refused. Pods of a RayCluster are validated as
    pods."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    manifests = render(*OPTIONS, values=values)
    num_validated = 0
    for manifest in manifests:
        if group_of(manifest) not in OPERATORS:
            kubernetes_validate.validate(manifest, version, strict=True)
            num_validated += 1
    for _, template in pod_templates(of_kind(manifests, "RayCluster")):
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod"} | template["metadata"],
            "spec": template["spec"],
        }
        kubernetes_validate.validate(pod, version, strict=True)
        num_validated += 1
    assert num_validated > 20


@pytest.mark.parametrize("values", VALUES)
def test_custom_resources_come_only_where_they_are_enabled(values: str) -> None:
    plain = {group_of(manifest) for manifest in render(values=values)}
    assert plain - BUILT_IN_GROUPS == ({"ray.io"} if values in ("standalone", "split-collocate") else set())
    everything = {group_of(manifest): manifest["kind"] for manifest in render(*OPTIONS, values=values)}
    assert everything.keys() - BUILT_IN_GROUPS - {"ray.io"} == OPERATORS.keys() - {"ray.io"}


@pytest.mark.parametrize(
    ("scheduler", "labels"),
    [
        ("volcano", {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": "rl"}),
        (
            "yunikorn",
            {
                "ray.io/gang-scheduling-enabled": "true",
                "yunikorn.apache.org/app-id": "test-penstock",
                "yunikorn.apache.org/queue": "rl",
            },
        ),
        ("scheduler-plugins", {"ray.io/gang-scheduling-enabled": "true"}),
        ("kai-scheduler", {"kai.scheduler/queue": "rl"}),
        ("kueue", {"kueue.x-k8s.io/queue-name": "rl"}),
    ],
)
def test_the_gang_scheduler_finds_its_labels(scheduler: str, labels: dict[str, str]) -> None:
    before = one(render(), "RayCluster")["metadata"]["labels"]
    after = one(render(f"--set=learner.gang.scheduler={scheduler},learner.gang.queue=rl"), "RayCluster")
    assert after["metadata"]["labels"] == before | labels


def test_servers_are_scaled_by_what_may_be_admitted() -> None:
    manifests = render(*OPTIONS)
    scaled = one(manifests, "ScaledObject")["spec"]
    server = one(manifests, "StatefulSet", "rollout")
    assert scaled["scaleTargetRef"]["name"] == server["metadata"]["name"]
    assert "replicas" not in server["spec"], "helm would undo what KEDA has scaled"
    [trigger] = scaled["triggers"]
    assert trigger["metadata"]["threshold"] == "64", "the groups that a server works on at once"
    for metric in ("penstock_queue_in_flight", "penstock_queue_depth", "penstock_queue_admission_room"):
        assert metric in trigger["metadata"]["query"]
    assert 'service="test-penstock-gateway"' in trigger["metadata"]["query"]
    gateway = one(manifests, "Deployment")
    assert "replicas" not in gateway["spec"]
    assert one(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == gateway["metadata"]["name"]


def test_every_metrics_port_is_scraped() -> None:
    manifests = render(*OPTIONS, "--set=monitoring.release=prom,config.run=run1")
    pods = [template for _, template in pod_templates(manifests)]
    services = of_kind(manifests, "Service")
    monitors = [*of_kind(manifests, "ServiceMonitor"), *of_kind(manifests, "PodMonitor")]
    assert len(monitors) == 3
    for monitor in monitors:
        assert monitor["metadata"]["labels"]["release"] == "prom"
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        if monitor["kind"] == "ServiceMonitor":
            [found] = [s["spec"]["ports"] for s in services if selector <= s["metadata"]["labels"].items()]
            [endpoint] = monitor["spec"]["endpoints"]
        else:
            [found] = [
                pod["spec"]["containers"][0]["ports"] for pod in pods if selector <= pod["metadata"]["labels"].items()
            ]
            [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] in {port["name"] for port in found}
        assert endpoint["relabelings"] == [{"targetLabel": "run", "replacement": "run1"}]


def test_alerts_and_dashboards_are_those_of_deploy() -> None:
    manifests = render(*OPTIONS)
    dashboards = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    assert dashboards
    maps = [m for m in of_kind(manifests, "ConfigMap") if m["metadata"]["labels"].get("grafana_dashboard") == "1"]
    shipped = {name: json.loads(text) for m in maps for name, text in m["data"].items()}
    assert shipped == {path.name: json.loads(path.read_text()) for path in dashboards}
    alerts = ROOT / "deploy" / "prometheus" / "alerts.yml"
    rules = [rule["spec"] for rule in of_kind(manifests, "PrometheusRule")]
    assert rules == ([yaml.safe_load(alerts.read_text())] if alerts.is_file() else [])
    without = render("--set=monitoring.enabled=true,monitoring.rules=false")
    assert not of_kind(without, "PrometheusRule")


def test_the_certificate_names_the_service_and_the_ingress_uses_it() -> None:
    manifests = render(*OPTIONS)
    certificate = one(manifests, "Certificate")["spec"]
    assert {"penstock.example.org", "test-penstock-gateway.default.svc"} <= set(certificate["dnsNames"])
    [tls] = one(manifests, "Ingress")["spec"]["tls"]
    assert tls == {"hosts": ["penstock.example.org"], "secretName": certificate["secretName"]}


def test_tls_reaches_everyone_who_calls_the_gateway(tmp_path: Path) -> None:
    manifests = render(*OPTIONS, "--set=gateway.tls.enabled=true,gateway.namedKeys=true")
    secret = one(manifests, "Certificate")["spec"]["secretName"]
    pod = one(manifests, "Deployment")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume.get("secret") for volume in pod["volumes"]}
    assert volumes["tls"]["secretName"] == secret
    assert [item["key"] for item in volumes["keys"]["items"]] == ["api-key", "cluster-key", "api-keys"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert pod["containers"][0][probe]["httpGet"]["scheme"] == "HTTPS"
    [endpoint] = one(manifests, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scheme"] == "https" and endpoint["tlsConfig"]["ca"]["secret"]["name"] == secret
    words = one(manifests, "Pod")["spec"]["containers"][0]["command"]
    assert "--url=https://test-penstock-gateway:8080" in words and "--tls-ca-file=/etc/penstock/tls/ca.crt" in words
    gateway = run_config(manifests, tmp_path).gateway
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert gateway.tls_cert_file == Path(mounts["tls"]) / "tls.crt"
    assert gateway.tls_key_file == Path(mounts["tls"]) / "tls.key"
    assert gateway.keys_file == Path(mounts["keys"]) / "api-keys"


def test_a_dataset_is_fed_by_a_job_of_its_own() -> None:
    assert not of_kind(render(), "Job", "-feed-")
    manifests = render(*OPTIONS)
    spec = one(manifests, "Job", "-feed-")["spec"]["template"]["spec"]
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v
    }
    assert claims["data"] == "my-data"
    assert {"name": "data", "mountPath": "/data", "readOnly": True} in spec["containers"][0]["volumeMounts"]
    redis = one(manifests, "NetworkPolicy", "-redis")["spec"]["ingress"][0]["from"]
    assert "feed" in [peer["podSelector"]["matchLabels"].get("app.kubernetes.io/component") for peer in redis]


def test_the_chart_brings_no_custom_resource_definitions() -> None:
    """Helm never upgrades the CRDs of a chart, so they belong to the installation of their operators."""
    assert not (CHART / "crds").exists()
    assert not of_kind(render(*OPTIONS), "CustomResourceDefinition")
