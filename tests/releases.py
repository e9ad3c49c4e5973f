"""A release of the chart on a control plane of the tests: installed, upgraded and looked at."""

from __future__ import annotations

import json
import secrets
import subprocess
from dataclasses import dataclass
from typing import Any

from control_plane import ControlPlane
from rendered_chart import CHART, HELM
from waiting import until

Manifest = dict[str, Any]
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}


@dataclass(frozen=True)
class Release:
    """A release with the name of its namespace, in which the restricted pod security standard is enforced."""

    plane: ControlPlane
    name: str

    def helm(self, *words: str) -> str:
        where = (f"--kubeconfig={self.plane.kubeconfig}", "-n", self.name)
        done = subprocess.run([str(HELM), *words, *where], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"helm {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def upgrade(self, values: str, *settings: str) -> str:
        return self.helm(
            "upgrade", "--install", self.name, str(CHART), "-f", str(CHART / f"values-{values}.yaml"), *settings
        )

    def kubectl(self, *words: str, given: str = "") -> str:
        command = [str(self.plane.kubectl), f"--kubeconfig={self.plane.kubeconfig}", "-n", self.name, *words]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, f"kubectl {' '.join(words)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def objects(self, kind: str) -> list[Manifest]:
        items: list[Manifest] = json.loads(self.kubectl("get", kind, "-o", "json"))["items"]
        return items

    def pods(self) -> dict[str, Manifest]:
        return {pod["metadata"]["name"]: pod for pod in self.objects("pods")}

    def wait_for_pods(self, timeout_s: float = 90) -> dict[str, Manifest]:
        """Wait until every workload has all its pods, of its newest template and ready. Returns the pods."""
        try:
            until(lambda: not self.unfinished(), "the pods", timeout_s)
        except AssertionError:
            events = [f"{one['reason']}: {one['message']}" for one in self.objects("events") if one["type"] != "Normal"]
            raise AssertionError(f"after {timeout_s:g} s: {self.unfinished()}; {sorted(set(events))[:8]}") from None
        return self.pods()

    def unfinished(self) -> list[str]:
        """The workloads that do not have all their pods, each with its state."""
        workloads = json.loads(self.kubectl("get", "deployments,statefulsets,jobs", "-o", "json"))["items"]
        return [text for one in workloads if (text := _unfinished(one))]


def new_release(plane: ControlPlane) -> Release:
    """A release in a new namespace, with the volume of models that the chart's users bring."""
    release = Release(plane, f"r-{secrets.token_hex(3)}")
    with plane.client() as client:
        client.post(
            "/api/v1/namespaces", json={"metadata": {"name": release.name, "labels": RESTRICTED}}
        ).raise_for_status()
        claim = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Ti"}}}
        body = {"metadata": {"name": "penstock-models"}, "spec": claim}
        client.post(f"/api/v1/namespaces/{release.name}/persistentvolumeclaims", json=body).raise_for_status()
    return release


def _unfinished(workload: Manifest) -> str:
    kind, spec, status = workload["kind"], workload["spec"], workload.get("status", {})
    if kind == "Job":
        has_all = status.get("ready", 0) + status.get("succeeded", 0) >= 1 or spec.get("suspend")
        wanted = 1
    else:
        wanted = spec["replicas"]
        is_seen = status.get("observedGeneration", 0) >= workload["metadata"]["generation"]
        counts = (status.get("replicas", 0), status.get("readyReplicas", 0), status.get("updatedReplicas", 0))
        has_all = is_seen and counts == (wanted, wanted, wanted)
    return "" if has_all else f"{kind} {workload['metadata']['name']} wants {wanted}, has {status}"
