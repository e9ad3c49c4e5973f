"""A Kubernetes control plane in processes of this machine, with nodes that only pretend to run their pods.

Its folder of binaries has those of envtest (`setup-envtest use`: etcd, kube-apiserver, kubectl) and two more of its
release (kube-controller-manager, kube-scheduler). Nothing here is a stand-in but the nodes: the API server validates
and stores, the controllers make pods, and the scheduler places them by their resources, affinities and priorities.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from penstock.machine.ports import free_port

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
