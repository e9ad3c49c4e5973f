"""The Secret that the chart makes if none is given. A small server plays the cluster's API for Helm's `lookup`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rendered_chart import VALUES, Manifest, needs_helm, of_kind, one, render, run_helm

pytestmark = needs_helm
NAME = "test-penstock-keys"


class Cluster(ThreadingHTTPServer):
    """Answers discovery, and holds one Secret or none."""

    stored: Manifest | None = None
    old_default: Manifest | None = None
    """The Secret that releases use whose values leave `secretName` to an older chart."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--dry-run=server", f"--kube-apiserver=http://127.0.0.1:{self.server_port}")


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:  # noqa: N802
        path = self.path.partition("?")[0].rstrip("/")
        secret = {"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}
        bodies: dict[str, Any] = {
            "/version": {"major": "1", "minor": "30", "gitVersion": "v1.30.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [secret]},
            f"/api/v1/namespaces/default/secrets/{NAME}": self.server.stored,  # type: ignore[attr-defined]
            "/api/v1/namespaces/default/secrets/penstock": self.server.old_default,  # type: ignore[attr-defined]
        }
        found = bodies.get(path)
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        self.wfile.write(json.dumps(found or missing).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def mounted_keys(manifests: list[Manifest]) -> set[str]:
    """The keys of the Secret that any pod uses."""
    text = json.dumps(manifests)
    return {key for key in keys_of(one(manifests, "Secret")) if f'"key": "{key}"' in text}


def keys_of(secret: Manifest) -> dict[str, str]:
    return {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}


@pytest.mark.parametrize("values", VALUES)
def test_the_chart_makes_every_key_that_its_pods_mount(values: str) -> None:
    manifests = render(values=values)
    secret = one(manifests, "Secret")
    assert secret["metadata"]["name"] == NAME
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    keys = keys_of(secret)
    assert {"api-key", "cluster-key", "redis-learner-password"} <= mounted_keys(manifests)
    assert all(len(key) == 48 for key in keys.values()) and len(set(keys.values())) == len(keys)
    assert keys != keys_of(one(render(values=values, anew=True), "Secret")), "the keys are random"


def test_an_upgrade_keeps_the_keys_of_the_cluster_and_adds_missing_ones(cluster: Cluster) -> None:
    first = one(render(*cluster.arguments, values="no-gpu", anew=True), "Secret")
    del first["data"]["ray-token"]
    cluster.stored = first
    second = keys_of(one(render(*cluster.arguments, values="no-gpu", anew=True), "Secret"))
    assert len(second.pop("ray-token")) == 48
    assert second == keys_of(first)


def test_an_upgrade_does_not_replace_the_keys_of_the_former_default(cluster: Cluster) -> None:
    first = one(render(*cluster.arguments, values="no-gpu", anew=True), "Secret")
    cluster.old_default = first | {"metadata": {"name": "penstock"}}
    result = run_helm("template", *cluster.arguments, "--is-upgrade", values="no-gpu")
    assert result.returncode != 0 and "set secretName to penstock" in result.stderr
    assert render(*cluster.arguments, "--is-upgrade", "--set=secretName=penstock", values="no-gpu", anew=True)
    cluster.stored = first
    assert render(*cluster.arguments, "--is-upgrade", values="no-gpu", anew=True), "its own Secret is there already"


def test_a_secret_of_the_operator_is_used_as_it_is() -> None:
    manifests = render("--set=secretName=mine")
    assert of_kind(manifests, "Secret") == []
    assert NAME not in json.dumps(manifests)
