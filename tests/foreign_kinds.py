"""Custom resource definitions of the operators that the chart makes objects for.

`PENSTOCK_CLUSTER_CRDS` names a folder with the definitions of their releases. Without it, each kind gets a definition
that takes any object, so that the chart can be installed, and only Kubernetes' own kinds are checked.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx

from control_plane import ControlPlane
from waiting import until

KINDS = {
    "cert-manager.io/v1": ("Certificate",),
    "gateway.networking.k8s.io/v1": ("HTTPRoute",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "kueue.x-k8s.io/v1beta2": ("ClusterQueue", "LocalQueue", "ResourceFlavor", "WorkloadPriorityClass"),
    "leaderworkerset.x-k8s.io/v1": ("LeaderWorkerSet",),
    "monitoring.coreos.com/v1": ("PodMonitor", "PrometheusRule", "ServiceMonitor"),
    "ray.io/v1": ("RayCluster", "RayJob"),
    "workload.codeflare.dev/v1beta2": ("AppWrapper",),
}
CLUSTER_WIDE = ("ClusterQueue", "ResourceFlavor", "WorkloadPriorityClass")


def add_foreign_kinds(plane: ControlPlane) -> None:
    """Add the definitions, and wait until the API server serves every kind of KINDS."""
    if folder := os.environ.get("PENSTOCK_CLUSTER_CRDS"):
        words = [plane.kubectl, f"--kubeconfig={plane.kubeconfig}", "apply", "--server-side", "-f", Path(folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    with plane.client() as client:
        for version, kinds in KINDS.items():
            for kind in kinds:
                if not folder:
                    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
                    client.post(path, json=_any_object(version, kind)).raise_for_status()
                until(lambda version=version, kind=kind: kind in _served(client, version), f"the kind {kind}")


def _served(client: httpx.Client, version: str) -> list[str]:
    answer = client.get(f"/apis/{version}")
    return [one["kind"] for one in answer.json()["resources"]] if answer.status_code == 200 else []


def _any_object(version: str, kind: str) -> dict[str, Any]:
    group, number = version.split("/")
    plural = kind.lower() + "s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Cluster" if kind in CLUSTER_WIDE else "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": number, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }
