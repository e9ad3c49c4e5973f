"""The bake file of the images, the workflows, and the make targets that they call."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import __version__

ROOT = Path(__file__).parents[3]
BAKE = json.loads((ROOT / "deploy" / "docker" / "bake.json").read_text())
IMAGES = ("services", "rollout-vllm", "rollout-sglang", "learner")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def resolved(name: str) -> dict[str, Any]:
    """A target with what it inherits. Arguments are merged, other fields replaced, as bake does."""
    own = BAKE["target"][name]
    fields: dict[str, Any] = {}
    for parent in own.get("inherits", []):
        fields |= resolved(parent)
    return fields | own | {"args": fields.get("args", {}) | own.get("args", {})}


@pytest.mark.parametrize("name", [name for name in BAKE["target"] if name != "image"])
def test_a_target_builds_its_dockerfile_for_both_architectures(name: str) -> None:
    target = resolved(name)
    assert target["platforms"] == ["linux/amd64", "linux/arm64"]
    assert [entry.split(",")[0] for entry in target["attest"]] == ["type=sbom", "type=provenance"]
    assert target["tags"] == [f"${{REGISTRY}}/{name}:${{TAG}}"]
    text = (ROOT / target["dockerfile"]).read_text()
    if stage := target.get("target"):
        assert f" AS {stage}\n" in text
    declared = set(re.findall(r"^ARG (\w+)=", text, re.M))
    assert target["args"].keys() <= declared, "an argument that the Dockerfile does not have would be ignored"


def test_the_groups_are_the_images_of_a_cluster_and_defaults_are_those_of_the_dockerfiles() -> None:
    assert tuple(BAKE["group"]["default"]["targets"]) == IMAGES
    assert {name for group in BAKE["group"].values() for name in group["targets"]} == BAKE["target"].keys() - {"image"}
    variables = {name: variable["default"] for name, variable in BAKE["variable"].items()}
    assert variables["TAG"] == __version__
    for path in (ROOT / "deploy" / "docker").glob("*.Dockerfile"):
        arguments = dict(re.findall(r"^ARG (PYTHON|VLLM|SGLANG)=(\S+)$", path.read_text(), re.M))
        assert arguments and arguments.items() <= variables.items(), path.name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_parses_and_calls_what_exists(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"]["contents"] == "read"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    for step in steps:
        assert re.search(r"@v\d+$", step.get("uses", "@v1")), "actions are pinned"
        script = step.get("run", "")
        assert "${{" not in script, "what a workflow knows goes through the environment, not into the text of a script"
        assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= targets
        for program in re.findall(r"(?:^|\s)((?:\.ci|deploy)/[\w./-]+)", script):
            assert os.access(ROOT / program, os.X_OK), program
    scripts = "\n".join(step.get("run", "") for step in steps)
    wanted = {"ci.yml": [".ci/run"], "release.yml": ["make images PUSH=1", "make chart", "cosign sign", "oci://"]}
    assert all(words in scripts for words in wanted[path.name])


def test_make_images_pushes_only_when_asked() -> None:
    def printed(*words: str) -> str:
        command = ["make", "--no-print-directory", "--dry-run", "images", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "--push" not in printed() and "--load" in printed() and f"TAG={__version__} " in printed()
    pushed = printed("PUSH=1", "REGISTRY=registry.example.org/me", "IMAGES=default cpu")
    assert "--push" in pushed and "--load" not in pushed and "REGISTRY=registry.example.org/me " in pushed
    assert pushed.rstrip().endswith("default cpu")


def test_the_chart_is_packaged_under_the_version_of_a_release(tmp_path: Path) -> None:
    helm = shutil.which("helm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if helm is None:
        pytest.skip("no helm")
    words = ["package", str(ROOT / "helm" / "penstock"), "--version=9.8.7", "--app-version=9.8.7"]
    subprocess.run([helm, *words, f"--destination={tmp_path}"], check=True, timeout=60, capture_output=True)
    assert (tmp_path / "penstock-9.8.7.tgz").exists()


def test_base_images_are_pinned_by_what_the_registry_says(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "sha256:$(printf %s "$4" | sha256sum | cut -c1-64)"\n')
    docker.chmod(0o755)
    done = subprocess.run(
        [ROOT / "deploy" / "docker" / "pinned-bases.sh"], env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    pins = dict(line.split("=", 1) for line in done.stdout.splitlines())
    for name in ("PYTHON", "VLLM", "SGLANG"):
        assert re.match(rf"^{re.escape(BAKE['variable'][name]['default'])}@sha256:[0-9a-f]{{64}}$", pins[name])
