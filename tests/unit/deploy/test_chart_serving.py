"""Rollout servers that answer HTTP themselves: port, Service, InferencePool, keys and network policy of the chart."""

from __future__ import annotations

from pathlib import Path

from support.chart import needs_helm, of_kind, one, refusal, render, run_config

pytestmark = needs_helm
ON = ("--set=rollout.http.enabled=true", "--set=gateway.namedKeys=true", "--set=secretName=mine")
PICKER = (
    "--set=rollout.http.inferencePool.enabled=true",
    "--set=rollout.http.inferencePool.endpointPicker.name=picker",
)


def test_without_it_nothing_changes(tmp_path: Path) -> None:
    manifests = render()
    assert run_config(manifests, tmp_path).rollout.http_port is None
    assert not of_kind(manifests, "InferencePool") and not of_kind(manifests, "Service", "-rollout-http")


def test_servers_have_the_port_behind_a_service_of_those_that_are_ready(tmp_path: Path) -> None:
    manifests = render(*ON, *PICKER)
    assert run_config(manifests, tmp_path).rollout.http_port == 8000
    pod = one(manifests, "StatefulSet", "-rollout")["spec"]["template"]
    assert {"name": "http", "containerPort": 8000} in pod["spec"]["containers"][0]["ports"]
    [keys] = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "keys"]
    assert [item["key"] for item in keys["secret"]["items"]] == ["cluster-key", "api-keys"], "not the admin's key"
    service = one(manifests, "Service", "-rollout-http")["spec"]
    assert not service.get("publishNotReadyAddresses") and service["ports"][0]["targetPort"] == "http"
    pool = one(manifests, "InferencePool", "-rollout")["spec"]
    assert pool["targetPorts"] == [{"number": 8000}]
    assert pool["endpointPickerRef"] == {"name": "picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
    for selector in (service["selector"], pool["selector"]["matchLabels"]):
        assert selector.items() <= pod["metadata"]["labels"].items()


def test_only_named_peers_may_call_it() -> None:
    def rules(*options: str) -> list[object]:
        policy = one(render(*ON, *options), "NetworkPolicy", "-rollout")
        return [rule["from"] for rule in policy["spec"]["ingress"] if {"port": "http"} in rule["ports"]]

    assert rules() == []
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "inference"}}}]
    name = "rollout.http.from[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name"
    assert rules(f"--set={name}=inference") == [peers]


def test_mistakes_are_refused_by_name() -> None:
    for options, words in (
        (("--set=rollout.http.enabled=true",), "set gateway.namedKeys"),
        ((*ON, PICKER[0]), "endpointPicker.name"),
        ((*ON, "--set=rollout.nodes=2,rollout.gpus=1,config.rollout.engine.tensor_parallel_size=2"), "nodes to 1"),
        ((*ON, "--set=config.rollout.http_port=8"), "http_port"),
    ):
        assert words in refusal(*options)
