"""Optional parts of the chart are only installed on request, and two versions of Kubernetes accept all of it."""

from __future__ import annotations

import base64
import json
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.config.service import TlsConfig
from penstock.internal_calls import check_certificates
from support.chart import (
    CHANGED,
    CHART,
    FURTHER_OPTIONS,
    HELM,
    OPTIONS,
    ROOT,
    RUNBOOKS,
    VALUES,
    Manifest,
    declare,
    further,
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
@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
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


@pytest.mark.parametrize("values", [*VALUES[:2], *further(*VALUES[2:])])
def test_custom_resources_come_only_where_they_are_enabled(values: str) -> None:
    plain = {group_of(manifest) for manifest in render(values=values)}
    assert plain - BUILT_IN_GROUPS == ({"ray.io"} if values in ("standalone", "split-collocate") else set())
    everything = {group_of(manifest): manifest["kind"] for manifest in render(*OPTIONS, values=values)}
    assert everything.keys() - BUILT_IN_GROUPS - {"ray.io"} == OPERATORS.keys() - {"ray.io"}


def ganged(scheduler: str) -> tuple[str]:
    return (f"--set=learner.gang.scheduler={scheduler},learner.gang.queue=rl",)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        (CHANGED, {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": "rl"}),
        *further(
            (
                ganged("yunikorn"),
                {
                    "ray.io/gang-scheduling-enabled": "true",
                    "yunikorn.apache.org/app-id": "test-penstock",
                    "yunikorn.apache.org/queue": "rl",
                },
            ),
            (ganged("scheduler-plugins"), {"ray.io/gang-scheduling-enabled": "true"}),
            (ganged("kai-scheduler"), {"kai.scheduler/queue": "rl"}),
            (ganged("kueue"), {"kueue.x-k8s.io/queue-name": "rl"}),
        ),
    ],
)
def test_the_gang_scheduler_finds_its_labels(options: tuple[str, ...], labels: dict[str, str]) -> None:
    before = one(render(), "RayCluster")["metadata"]["labels"]
    after = one(render(*options), "RayCluster")
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
    manifests = render(*FURTHER_OPTIONS)
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
        run, *pools = endpoint["relabelings"]
        assert run == {"targetLabel": "run", "replacement": "run1"}
        assert [each["targetLabel"] for each in pools] == ["pool"] * monitor["metadata"]["name"].endswith("-rollout")


PUBLIC = (
    *OPTIONS,
    "--set=certManager.publicNamesOnly=true,gateway.tls.enabled=true",
    "--set=monitoring.runbookUrl=https://wiki.example.com/penstock",
)
declare(PUBLIC)


SHARED = (
    *OPTIONS,
    "--set=redis.enabled=false,externalRedis.url=redis://redis:6379/0,externalRedis.existingSecret=redis",
    "--set=storage.runs.existingClaim=runs",
)
declare((*SHARED, "--set=config.run=test"))


@pytest.mark.parametrize("options", [OPTIONS, *further((SHARED,))], ids=["own Redis", "one Redis"])
def test_two_releases_in_one_namespace_have_nothing_in_common(options: tuple[str, ...], tmp_path: Path) -> None:
    words = [*options, "--set=config.run=other", "-f", str(CHART / "values-standalone.yaml")]
    command = [str(HELM), "template", "other", str(CHART), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    other = [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]
    mine = render(*options, "--set=config.run=test") if options == SHARED else render(*options)
    names = [{(m["kind"], m["metadata"]["name"]) for m in manifests} for manifests in (mine, other)]
    assert len(names[0]) == len(names[1]) > 20 and not names[0] & names[1]
    for manifest in other:
        assert "test-penstock" not in json.dumps(manifest), manifest["metadata"]["name"]
    selectors = [m["spec"]["podSelector"]["matchLabels"] for m in of_kind(other, "NetworkPolicy")]
    selectors += [m["spec"]["selector"] for m in of_kind(other, "Service")]
    assert selectors and {each["app.kubernetes.io/instance"] for each in selectors} == {"other"}
    configs = [run_config(manifests, tmp_path) for manifests in (mine, other)]
    assert (configs[0].redis.url == configs[1].redis.url) == (options == SHARED)
    assert configs[0].folder != configs[1].folder, "they may share a volume"


def test_alerts_and_dashboards_link_to_the_runbooks_of_the_deployment() -> None:
    for options, page in (
        (OPTIONS, "https://penstock.example.org/console/runbooks.html"),
        (PUBLIC, "https://wiki.example.com/penstock"),
    ):
        manifests = render(*options)
        [rules] = [rule["spec"]["groups"] for rule in of_kind(manifests, "PrometheusRule")]
        urls = [rule["annotations"]["runbook_url"] for group in rules for rule in group["rules"]]
        assert urls and {url.partition("#")[0] for url in urls} == {page}
        boards = [m["data"] for m in of_kind(manifests, "ConfigMap") if "grafana_dashboard" in m["metadata"]["labels"]]
        text = json.dumps(boards)
        assert page in text and RUNBOOKS not in text


def test_alerts_and_dashboards_are_those_of_deploy() -> None:
    manifests = render(*FURTHER_OPTIONS)
    dashboards = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    assert dashboards
    maps = [m for m in of_kind(manifests, "ConfigMap") if m["metadata"]["labels"].get("grafana_dashboard") == "1"]
    shipped = {name: json.loads(text) for m in maps for name, text in m["data"].items()}
    assert shipped == {path.name: json.loads(path.read_text()) for path in dashboards}
    alerts = ROOT / "deploy" / "prometheus" / "alerts.yml"
    rules = [rule["spec"] for rule in of_kind(manifests, "PrometheusRule")]
    assert rules == ([yaml.safe_load(alerts.read_text())] if alerts.is_file() else [])
    without = render(*CHANGED)
    assert of_kind(without, "ServiceMonitor") and not of_kind(without, "PrometheusRule")


def test_the_certificate_names_the_service_and_the_ingress_uses_it() -> None:
    manifests = render(*OPTIONS)
    certificate = one(manifests, "Certificate")["spec"]
    assert {"penstock.example.org", "test-penstock-gateway.default.svc"} <= set(certificate["dnsNames"])
    [tls] = one(manifests, "Ingress")["spec"]["tls"]
    assert tls == {"hosts": ["penstock.example.org"], "secretName": certificate["secretName"]}


def test_tls_reaches_everyone_who_calls_the_gateway(tmp_path: Path) -> None:
    manifests = render(*FURTHER_OPTIONS)
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
    assert "--url=https://test-penstock-gateway:8080" in words
    [volume] = [v["secret"] for v in one(manifests, "Pod")["spec"]["volumes"] if v["name"] == "tls"]
    assert volume["optional"], "a certificate of a public authority has no ca.crt"
    nginx = {"nginx.ingress.kubernetes.io/backend-protocol": "HTTPS"}
    assert one(manifests, "Ingress")["metadata"]["annotations"] == nginx
    assert "annotations" not in one(render(*OPTIONS), "Ingress")["metadata"], "the gateway speaks HTTP"
    assert not of_kind(render(*OPTIONS), "BackendTLSPolicy")
    policy = one(manifests, "BackendTLSPolicy")["spec"]
    assert policy["validation"]["hostname"] in one(manifests, "Certificate")["spec"]["dnsNames"]
    assert [ref["name"] for ref in policy["validation"]["caCertificateRefs"]] == ["authority"]
    [target] = policy["targetRefs"]
    service = one(manifests, "Service", target["name"])
    assert target["sectionName"] in {port["name"] for port in service["spec"]["ports"]}
    public = one(render(*PUBLIC), "BackendTLSPolicy")["spec"]["validation"]
    assert public == {"wellKnownCACertificates": "System", "hostname": "penstock.example.org"}
    gateway = run_config(manifests, tmp_path).gateway
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert gateway.tls_cert_file == Path(mounts["tls"]) / "tls.crt"
    assert gateway.tls_key_file == Path(mounts["tls"]) / "tls.key"
    assert gateway.keys_file == Path(mounts["keys"]) / "api-keys"


ENCRYPTED = ("--set=tls.enabled=true", "--set=config.dataset.file=/data/train.parquet")
declare(ENCRYPTED)


def test_one_value_gives_every_process_a_certificate_that_the_others_accept(tmp_path: Path) -> None:
    manifests = render(*ENCRYPTED)
    config, made = run_config(manifests, tmp_path), one(manifests, "Secret")["data"]
    assert config.redis.url.startswith("rediss://test-penstock-redis:")
    assert config.redis.tls_ca_file == config.tls.ca_file == Path("/etc/penstock/certificates/ca.crt")
    for file in config.tls.files:
        (tmp_path / file.name).write_bytes(base64.b64decode(made[file.name]))
    check_certificates(TlsConfig(**{name: tmp_path / file.name for name, file in config.tls}))
    client = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    hosts = subprocess.run(
        ["openssl", "x509", "-in", str(tmp_path / "tls.crt"), "-noout", "-ext", "subjectAltName"],
        check=True, capture_output=True, text=True, timeout=100,
    ).stdout  # fmt: skip
    assert client.get_ca_certs() and "DNS:test-penstock-redis" in hosts and "DNS:penstock" in hosts
    without = set()
    for _, template in pod_templates(manifests):
        for container in template["spec"]["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
            if "/etc/penstock/certificates" not in mounts and "/etc/certificates" not in mounts:
                without.add(container["name"])
    assert without == {"ray-head", "status"}, "Ray's head runs none of our processes, and `helm test` is a client"


def test_redis_takes_encrypted_connections_only() -> None:
    [container] = one(render(*ENCRYPTED), "StatefulSet", "redis")["spec"]["template"]["spec"]["containers"]
    options = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
    assert (options["--port"], options["--tls-port"]) == ("0", "6379")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(options[f"--tls-{name}-file"]).parent) for name in ("cert", "key", "ca-cert")} <= mounts
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert " --tls --cacert /etc/certificates/ca.crt " in container[probe]["exec"]["command"][2]
    waiting = container["lifecycle"]["preStop"]["exec"]["command"]
    assert waiting[4:8] == ["-h", "127.0.0.1", "--tls", "--cacert"]


ELSEWHERE = (
    "--set=gateway.tls.enabled=true,gateway.tls.secretName=t,gateway.ingress.enabled=true",
    "--set=gateway.ingress.host=a.example.org,gateway.ingress.className=traefik,gateway.ingress.tlsSecretName=mine",
    r"--set=gateway.service.annotations.traefik\.ingress\.kubernetes\.io/service\.serversscheme=https",
)
declare(ELSEWHERE)


def test_a_controller_that_speaks_https_by_an_annotation_of_the_service_gets_it() -> None:
    manifests = render(*ELSEWHERE)
    service = one(manifests, "Service", "gateway")["metadata"]
    assert service["annotations"] == {"traefik.ingress.kubernetes.io/service.serversscheme": "https"}
    ingress = one(manifests, "Ingress")
    assert "annotations" not in ingress["metadata"]
    assert ingress["spec"]["tls"] == [{"hosts": ["a.example.org"], "secretName": "mine"}]


REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
STORED = (
    f"--set-json=files={json.dumps({'reward.py': REWARD, 'train.jsonl': '{}'})}",
    "--set=config.rollout.reward.function_file=/etc/penstock/files/reward.py",
    "--set=config.dataset.file=/etc/penstock/files/train.jsonl",
    "--set=config.learner.checkpoint.upload=s3://bucket/runs,learner.driver.envFrom[0].secretRef.name=s3",
    "--set=rollout.envFrom[0].secretRef.name=s3,feed.envFrom[0].secretRef.name=s3",
    "--set=modelDownload.source=s3://bucket/qwen,modelDownload.envFrom[0].secretRef.name=s3",
    "--set=storage.data.source=s3://bucket/data,storage.data.envFrom[0].secretRef.name=s3,storage.data.size=3Gi",
)
declare(STORED, (STORED[0].replace("1.0", "2.0"), *STORED[1:]))


def test_an_object_store_gets_its_secret_where_it_is_called(tmp_path: Path) -> None:
    manifests = render(*STORED)
    assert run_config(manifests, tmp_path).learner.checkpoint.upload == "s3://bucket/runs"
    secret = [{"secretRef": {"name": "s3"}}]
    with_secret = {
        container["name"]
        for _, template in pod_templates(manifests)
        for container in [*template["spec"]["containers"], *template["spec"].get("initContainers", [])]
        if container.get("envFrom") == secret
    }
    assert with_secret == {"learner", "rollout", "feed", "model", "data", "download"}


def test_every_pod_that_reads_data_downloads_it_before_it_starts() -> None:
    reading = set()
    for name, template in pod_templates(render(*STORED)):
        spec = template["spec"]
        main = spec["containers"][0]
        mounts = [mount for mount in main["volumeMounts"] if mount["mountPath"] == "/data" and mount["name"] == "data"]
        loading = [each for each in spec.get("initContainers", []) if each["name"] == "data"]
        if main["name"] in ("redis", "gateway", "ray-head", "download", "status"):
            assert not loading, name
            continue
        reading.add(main["name"])
        assert mounts == [{"name": "data", "mountPath": "/data", "readOnly": True}], name
        [volume] = [volume for volume in spec["volumes"] if volume["name"] == "data"]
        assert volume["emptyDir"] == {"sizeLimit": "3Gi"}, name
        [container] = loading
        assert container["args"] == ["fetch-model", "--all-files", "s3://bucket/data", "/data", "--timeout=3600"], name
        assert {"name": "data", "mountPath": "/data"} in container["volumeMounts"], name
    assert reading == {"learner", "rollout", "feed", "ray-worker"}


def test_small_files_are_where_the_config_names_them_and_a_change_restarts_their_readers(tmp_path: Path) -> None:
    manifests = render(*STORED)
    files = one(manifests, "ConfigMap", "-files")
    assert files["data"] == {"reward.py": REWARD, "train.jsonl": "{}"}
    config = run_config(manifests, tmp_path)
    changed = render(STORED[0].replace("1.0", "2.0"), *STORED[1:])
    restarted = set()
    for (name, template), (_, other) in zip(pod_templates(manifests), pod_templates(changed), strict=True):
        main = template["spec"]["containers"][0]
        paths = {mount["name"]: mount["mountPath"] for mount in main["volumeMounts"]}
        if "files" in paths:
            assert config.rollout.reward.function_file == Path(paths["files"], "reward.py"), name
            assert config.dataset.file == Path(paths["files"], "train.jsonl"), name
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            assert volumes["files"]["configMap"]["name"] == files["metadata"]["name"], name
            restarted |= {main["name"]} if template != other else set()
        else:
            assert main["name"] in ("gateway", "redis", "ray-head", "download", "status") and template == other, name
    assert restarted == {"learner", "rollout", "feed"}


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


def test_gateways_read_samples_from_the_learners_volume_if_every_node_can_mount_it(tmp_path: Path) -> None:
    def gateway_of(*options: str) -> tuple[list[str], object]:
        manifests = render(*options)
        [(_, template)] = [(name, template) for name, template in pod_templates(manifests) if name.endswith("-gateway")]
        volumes = [volume["name"] for volume in template["spec"]["volumes"]]
        [mount] = [
            mount for mount in template["spec"]["containers"][0]["volumeMounts"] if mount["name"] == "learner-runs"
        ] or [None]
        assert mount is None or mount["readOnly"]
        return volumes, run_config(manifests, tmp_path).gateway.samples_dir

    volumes, samples_dir = gateway_of()
    assert "learner-runs" in volumes and samples_dir == Path("/learner-runs")
    volumes, samples_dir = gateway_of(*CHANGED)
    assert "learner-runs" not in volumes and samples_dir is None


def test_compiled_code_is_on_a_volume_that_outlives_the_pods(tmp_path: Path) -> None:
    """Without a claim of its own it is in the folder of all runs, which every pod that compiles mounts."""
    compiling = {"rollout": "server", "learner": "learner", "ray": "ranks"}

    def cached(*options: str) -> tuple[Path, list[tuple[str, list[str]]]]:
        manifests = render(*options, values="standalone")
        pods = [(name, template["spec"]) for name, template in pod_templates(manifests)]
        mounts = [
            (name, [mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]])
            for name, spec in pods
            if any(part in name for part in compiling) and "head" not in name
        ]
        return run_config(manifests, tmp_path).cache_folder, mounts

    folder, mounts = cached()
    assert folder == Path("/runs/_cache") and len(mounts) >= 3
    assert all("/runs" in paths for _, paths in mounts), mounts
    folder, mounts = cached(*CHANGED)
    assert folder == Path("/cache")
    assert all("/cache" in paths for _, paths in mounts), mounts


def test_a_certificate_of_a_public_authority_names_no_part_of_the_cluster() -> None:
    public = render(*PUBLIC)
    assert one(public, "Certificate")["spec"]["dnsNames"] == ["penstock.example.org"]
    words = one(public, "Pod")["spec"]["containers"][0]["command"]
    assert "--url=https://penstock.example.org" in words, "the certificate does not name the Service"
    [endpoint] = one(public, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["tlsConfig"]["serverName"] == "penstock.example.org"


def test_the_notes_name_the_scheme_and_the_servers_that_there_are(tmp_path: Path) -> None:
    # `helm template` prints no notes, so a copy of the chart has them in a manifest.
    chart = shutil.copytree(CHART, tmp_path / "penstock", ignore=shutil.ignore_patterns("dashboards"))
    notes_text = '{{ include (print $.Template.BasePath "/NOTES.txt") . | toJson }}'
    shown = f"kind: Notes\nmetadata: {{name: notes}}\ntext: {notes_text}\n"
    (chart / "templates" / "shown.yaml").write_text(shown)

    def notes(*options: str) -> str:
        words = [str(HELM), "template", "t", str(chart), "-s", "templates/shown.yaml", *options]
        result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        return str(yaml.safe_load(result.stdout)["text"])

    plain = notes()
    assert "http://127.0.0.1:8080" in plain and "rollout servers  2, 1 GPU each" in plain
    url = "rollout.autoscaling.prometheusUrl=http://prometheus:9090"
    changed = notes(
        "--set=gateway.tls.enabled=true,gateway.tls.secretName=mine",
        f"--set=rollout.autoscaling.enabled=true,rollout.autoscaling.maxReplicas=9,{url}",
    )
    assert "https://127.0.0.1:8080" in changed and "http://" not in changed
    assert "rollout servers  1 to 9" in changed


def test_a_number_that_set_makes_a_text_is_a_number_for_the_processes(tmp_path: Path) -> None:
    learner = run_config(render(*CHANGED), tmp_path).learner
    assert learner.lr == 2e-4


@pytest.mark.parametrize(("into", "options"), [("claim", FURTHER_OPTIONS), ("pod", CHANGED)], ids=["claim", "pod"])
def test_every_pod_that_needs_the_model_fetches_it_or_waits_for_it(
    into: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    manifests = render(*options)
    fetching = {name: template["spec"] for name, template in pod_templates(manifests)
                if "fetch-model" in str(template["spec"])}  # fmt: skip
    kinds = {"rollout", "learner", "ray-worker"} | ({"download"} if into == "claim" else set())
    assert {spec["containers"][0]["name"] for spec in fetching.values()} == kinds
    for name, spec in fetching.items():
        container = [*spec.get("initContainers", []), *spec["containers"]][0]
        assert not [m for m in container["volumeMounts"] if m["name"] == "models" and m.get("readOnly")], name
        [volume] = [v for v in spec["volumes"] if v["name"] == "models"]
        assert ("emptyDir" in volume) == (into == "pod"), name
        if volume.get("persistentVolumeClaim"):
            assert (
                volume["persistentVolumeClaim"]["claimName"]
                == one(manifests, "PersistentVolumeClaim", "models")["metadata"]["name"]
            )
    words = [word.replace("/models", str(tmp_path)) for word in container["args"]]
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "policy" / "config.json").is_file()
