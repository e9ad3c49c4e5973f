"""Nodes that pretend to run the pods which the scheduler gives them, and volumes that pretend to be there.

A pod becomes running and ready as soon as it has a node, unless an image in it is named `broken`; then it stays
pending, as if the image could not be pulled. A pod that is deleted is gone at once, without `preStop` and grace period.
"""

from __future__ import annotations

import threading
from typing import Any

import httpx

from control_plane import ControlPlane

Manifest = dict[str, Any]
LOOK_S = 0.3
PATCH = {"Content-Type": "application/strategic-merge-patch+json"}


def add_node(
    client: httpx.Client, name: str, *, cpus: int = 64, gpus: int = 0, labels: dict[str, str] | None = None
) -> None:
    """Add a ready node."""
    node = {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}}
    client.post("/api/v1/nodes", json=node).raise_for_status()
    resources = {"cpu": str(cpus), "memory": "1024Gi", "ephemeral-storage": "4096Gi", "pods": "250"}
    if gpus:
        resources["nvidia.com/gpu"] = str(gpus)
    conditions = [{"type": "Ready", "status": "True", "reason": "Hollow"}]
    status = {"status": {"capacity": resources, "allocatable": resources, "conditions": conditions}}
    client.patch(f"/api/v1/nodes/{name}/status", json=status, headers=PATCH).raise_for_status()
    untainted = {"spec": {"taints": None}}  # admission taints a node that is not ready when it is added
    client.patch(f"/api/v1/nodes/{name}", json=untainted, headers=PATCH).raise_for_status()


class HollowNodes:
    """Plays the kubelets of all nodes and the provisioner of all volumes, in a thread of its own."""

    def __init__(self, plane: ControlPlane) -> None:
        self._client = plane.client()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._play, name="hollow-nodes")
        self.error: Exception | None = None

    def __enter__(self) -> HollowNodes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(60)
        self._client.close()

    def _play(self) -> None:
        while not self._stopping.wait(LOOK_S):
            try:
                for claim in self._items("/api/v1/persistentvolumeclaims?limit=5000"):
                    self._provide_volume(claim)
                for pod in self._items("/api/v1/pods?limit=5000"):
                    self._play_pod(pod)
            except Exception as error:  # the test reads it: a thread cannot fail a test
                self.error = error
                return

    def _items(self, path: str) -> list[Manifest]:
        items: list[Manifest] = self._client.get(path).raise_for_status().json()["items"]
        return items

    def _play_pod(self, pod: Manifest) -> None:
        meta, phase = pod["metadata"], pod["status"].get("phase")
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if "nodeName" not in pod["spec"] or phase not in ("Pending", "Running"):
            return
        if "deletionTimestamp" in meta:
            preconditions = {"uid": meta["uid"]}
            body = {"gracePeriodSeconds": 0, "preconditions": preconditions}
            self._taken(self._client.request("DELETE", path, json=body))
        elif phase == "Pending" and not any("broken" in one["image"] for one in pod["spec"]["containers"]):
            self._taken(self._client.patch(f"{path}/status", json=_running(pod), headers=PATCH))

    def _provide_volume(self, claim: Manifest) -> None:
        meta, spec = claim["metadata"], claim["spec"]
        if claim["status"].get("phase") != "Pending" or spec.get("volumeName"):
            return
        volume = {
            "metadata": {"name": f"volume-{meta['uid']}"},
            "spec": {
                "capacity": spec["resources"]["requests"],
                "accessModes": spec["accessModes"],
                "storageClassName": spec.get("storageClassName", ""),
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]},
                "hostPath": {"path": "/nowhere"},
            },
        }
        self._taken(self._client.post("/api/v1/persistentvolumes", json=volume))

    def _taken(self, answer: httpx.Response) -> None:
        """Raise unless the call was taken, or came too late because the object has changed."""
        if answer.status_code not in (404, 409):
            answer.raise_for_status()


def _running(pod: Manifest) -> Manifest:
    conditions = [
        {"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready", "PodScheduled")
    ]
    states = [
        {
            "name": one["name"], "image": one["image"], "imageID": one["image"], "ready": True, "started": True,
            "restartCount": 0, "state": {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}},
        }
        for one in pod["spec"]["containers"]
    ]  # fmt: skip
    address = {"podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}]}
    return {"status": {"phase": "Running", "conditions": conditions, "containerStatuses": states, **address}}
