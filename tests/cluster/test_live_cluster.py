"""The chart on the cluster that KUBECONFIG points to. Without one, the tests are skipped and say why.

    KUBECONFIG=~/.kube/config python -m pytest tests/cluster -m long
    PENSTOCK_CLUSTER_IMAGES=registry.example.org/penstock python -m pytest tests/cluster -m long    # and trains

The API server checks every manifest of every values file without storing it, under restricted pod security; also with
all options, and with 1,000 servers in ten pools. Custom resources are checked where their definitions are installed.
With images that its nodes can pull, values-no-gpu.yaml is installed into a namespace of its own, trains, is upgraded
and rolled back, is removed while it trains, and continues after a new install.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
import yaml

from support.chart import CHART, HELM, OPTIONS, VALUES, Manifest, needs_helm, render

pytestmark = [needs_helm, pytest.mark.long, pytest.mark.timeout(1800)]
BUILT_IN = ("v1", "apps/v1", "autoscaling/v2", "batch/v1", "networking.k8s.io/v1", "policy/v1")
IMAGES = os.environ.get("PENSTOCK_CLUSTER_IMAGES", "")
RELEASE = "live"


def run(*words: str, given: str = "", timeout_s: float = 120) -> str:
    result = subprocess.run(words, input=given, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.returncode == 0, f"{' '.join(words)}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def kubectl() -> str:
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("no kubectl on the PATH")
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: no cluster to try the chart on")
    answer = subprocess.run([found, "version", "-o", "json"], capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode != 0 or "serverVersion" not in answer.stdout:
        pytest.skip(f"the cluster of KUBECONFIG does not answer: {answer.stderr.strip()[-200:]}")
    return found


@pytest.fixture(scope="module")
def namespace(kubectl: str) -> Iterator[str]:
    """A new namespace."""
    name = f"penstock-test-{secrets.token_hex(4)}"
    run(kubectl, "create", "namespace", name)
    run(kubectl, "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield name
    finally:
        run(kubectl, "delete", "namespace", name, "--wait=false")


def known_groups(kubectl: str) -> set[str]:
    """The `apiVersion`s that the API server has."""
    return set(run(kubectl, "api-versions").split())


def dry_run(kubectl: str, namespace: str, manifests: list[Manifest]) -> str:
    """Let the API server check manifests as if they were applied. A pod needs its account, which a dry run does not
    store, so that is applied."""
    served = known_groups(kubectl)
    manifests = [manifest for manifest in manifests if manifest["apiVersion"] in served]
    accounts = [manifest for manifest in manifests if manifest["kind"] == "ServiceAccount"]
    assert manifests and accounts
    run(kubectl, "-n", namespace, "apply", "-f", "-", given=yaml.safe_dump_all(accounts))
    words = (kubectl, "-n", namespace, "apply", "--dry-run=server", "--validate=strict", "-f", "-")
    return run(*words, given=yaml.safe_dump_all(manifests), timeout_s=300)


OPTION_SETS = {
    "plain": (),
    "options": (*OPTIONS, "--set=networkPolicy.egress.enabled=true,huggingFace.tokenSecret=hub"),
    "pools": (f"--set-json=rollout.pools={json.dumps([{'name': f'p{n}', 'replicas': 100} for n in range(10)])}",),
    "queued": ("--set=kueue.queueName=runs,kueue.wholeRun=false",),
    "wrapped": ("--set=kueue.queueName=runs",),
}


@pytest.mark.parametrize("options", OPTION_SETS)
@pytest.mark.parametrize("values", VALUES)
def test_the_api_server_takes_every_manifest(kubectl: str, namespace: str, values: str, options: str) -> None:
    manifests = render(*OPTION_SETS[options], values=values)
    answer = dry_run(kubectl, namespace, manifests)
    built_in = [manifest for manifest in manifests if manifest["apiVersion"] in BUILT_IN]
    assert len(answer.splitlines()) >= len(built_in)


@pytest.fixture(scope="module")
def installed(kubectl: str, namespace: str) -> Iterator[Callable[..., str]]:
    """A function that installs or upgrades the release: `installed("--set=…")`. The release is removed at the end."""
    if not IMAGES:
        pytest.skip("PENSTOCK_CLUSTER_IMAGES is not set: no images that the cluster can pull")
    images = [f"--set=images.{name}.repository={IMAGES}/{repository}" for name, repository in
              (("services", "services"), ("rollout", "rollout-cpu"), ("learner", "learner-cpu"))]  # fmt: skip

    def upgrade(*settings: str) -> str:
        files = ("-f", str(CHART / "values-no-gpu.yaml"))
        words = (str(HELM), "upgrade", "--install", RELEASE, str(CHART), "-n", namespace, *files, *images, *settings)
        return run(*words, timeout_s=300)

    upgrade()
    try:
        yield upgrade
    finally:
        run(str(HELM), "uninstall", RELEASE, "-n", namespace, timeout_s=300)


def wait_for(found: Callable[[], bool], about: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {about}"
        time.sleep(5)


def test_a_run_trains_is_upgraded_rolled_back_and_continues_after_an_uninstall(
    kubectl: str, namespace: str, installed: Callable[..., str]
) -> None:
    def status() -> str:
        """Output of `penstock status` in a gateway's pod, or empty while it cannot answer."""
        script = "penstock status --url http://127.0.0.1:8080 --api-key-file /etc/penstock/keys/api-key --json"
        words = [kubectl, "-n", namespace, "exec", f"deploy/{RELEASE}-penstock-gateway", "--", "sh", "-c", script]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return answer.stdout if answer.returncode == 0 else ""

    def step() -> int:
        text = status()
        return int(yaml.safe_load(text)["step"]) if text else 0

    def pods() -> str:
        return run(kubectl, "-n", namespace, "get", "pods", "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name")

    wait_for(lambda: step() >= 3, "three steps", 900)
    run(str(HELM), "test", RELEASE, "-n", namespace, timeout_s=300)
    before = step()
    installed("--set=config.learner.lr=2e-4")
    wait_for(lambda: step() > before + 3, "steps after the upgrade", 900)
    run(str(HELM), "rollback", RELEASE, "-n", namespace, timeout_s=300)
    before = step()
    wait_for(lambda: step() > before + 3, "steps after the rollback", 900)
    assert yaml.safe_load(status())["queue"]["conservation_error"] == 0

    before = step()
    run(str(HELM), "uninstall", RELEASE, "-n", namespace, timeout_s=300)
    seen: list[str] = []

    def is_gone() -> bool:
        seen.append(pods())
        return not seen[-1]

    wait_for(is_gone, "the end of all pods", 900)
    assert [names for names in seen if "-redis-" in names] == seen[:-1], "Redis was stopped before another process"
    installed()
    wait_for(lambda: step() >= before, "the steps before the uninstall", 900)
    wait_for(lambda: step() > before + 3, "steps after the new install", 900)
