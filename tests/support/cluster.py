"""A Kubernetes control plane in processes of this machine, with nodes that only pretend to run their pods.

Its folder of binaries has those of envtest (`setup-envtest use`: etcd, kube-apiserver, kubectl) and two more of its
release (kube-controller-manager, kube-scheduler). Nothing here is a stand-in but the nodes: the API server validates
and stores, the controllers make pods, and the scheduler places them by their resources, affinities and priorities.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from penstock.machine import free_port
from support.chart import CHART, HELM
from support.processes import until

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
TOKEN = "admin-of-the-test"
START_S = 120.0


@dataclass(frozen=True)
class ControlPlane:
    """A running control plane. It ends with the `with` block of `running_control_plane`."""

    url: str
    kubeconfig: Path
    kubectl: Path
    folder: Path

    def client(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.Client(base_url=self.url, headers=headers, verify=False, timeout=60)  # noqa: S501


@contextlib.contextmanager
def running_control_plane(binaries: Path, folder: Path) -> Iterator[ControlPlane]:
    """Start the programs in `binaries` with their data in `folder`, and end them by their process ids."""
    missing = [name for name in PROGRAMS if not (binaries / name).exists()]
    if missing:
        raise FileNotFoundError(f"{binaries} has no {', '.join(missing)}")
    etcd_port, peer_port, api_port = free_port(), free_port(), free_port()
    url = f"https://127.0.0.1:{api_port}"
    kubeconfig = _write_access(folder, url)
    with contextlib.ExitStack() as running:

        def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
            log = running.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen([str(binaries / name), *arguments], stdout=log, stderr=log)
            running.callback(_end, process)
            return process

        start(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd_port}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
            f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer_port}",
            f"--initial-cluster=default=http://127.0.0.1:{peer_port}",
        )
        server = start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            f"--secure-port={api_port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={folder / 'certificates'}",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            f"--service-account-key-file={folder / 'accounts.key'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
        )
        plane = ControlPlane(url, kubeconfig, binaries / "kubectl", folder)
        _wait_until_ready(plane, server)
        start(
            "kube-controller-manager",
            f"--kubeconfig={kubeconfig}",
            f"--service-account-private-key-file={folder / 'accounts.key'}",
            f"--secure-port={free_port()}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--controllers=*,-node-lifecycle-controller",  # nobody sends the heartbeats of the nodes
        )
        start(
            "kube-scheduler",
            f"--kubeconfig={kubeconfig}",
            f"--secure-port={free_port()}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        )
        yield plane


def _write_access(folder: Path, url: str) -> Path:
    """Write the token, the key of the service accounts and a kubeconfig for an administrator. Returns the last."""
    key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
    subprocess.run(key, check=True, capture_output=True, timeout=60)
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    kubeconfig = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": url, "insecure-skip-tls-verify": True}}],
        "users": [{"name": "admin", "user": {"token": TOKEN}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "current-context": "test",
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(kubeconfig))
    path.chmod(0o600)
    return path


def _wait_until_ready(plane: ControlPlane, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    with plane.client() as client:
        while time.monotonic() < deadline:
            assert server.poll() is None, (plane.folder / "kube-apiserver.log").read_text()[-2000:]
            with contextlib.suppress(httpx.TransportError):
                if client.get("/readyz").status_code == 200:
                    return
            time.sleep(0.3)
    raise TimeoutError(f"the API server was not ready within {START_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(20)


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
