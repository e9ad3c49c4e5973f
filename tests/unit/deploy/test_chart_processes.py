"""Every process of the rendered chart starts with `--check` as its pod would start it, so that the two stay in line.

A pod's files are made in a folder, with its mounts as sub-folders. Paths in its config and arguments are moved there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config.loading import load_config
from rendered_chart import ROOT, VALUES, Manifest, needs_helm, one, pod_templates, render

pytestmark = needs_helm
MODEL = ROOT / "examples" / "arithmetic"
FILES = {
    "keys/api-key": "k" * 32,
    "keys/cluster-key": "c" * 32,
    "redis/password": "p@s:s/w#o%r?d&\n",
}
"""Secrets of a pod, below /etc/penstock."""


class PodFolder:
    """The file system of a pod, as far as Penstock's processes read it."""

    def __init__(self, folder: Path, manifests: list[Manifest]) -> None:
        self.folder = folder
        for name, content in FILES.items():
            path = folder / "etc/penstock" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        (folder / "runs").mkdir()
        shutil.copytree(MODEL, folder / "opt/examples/arithmetic")
        shutil.copytree(MODEL / "model", folder / "models/policy")
        config = one(manifests, "ConfigMap", "-config")["data"]["run.yaml"]
        (folder / "etc/penstock/run.yaml").write_text(self.moved(config))

    def moved(self, text: str) -> str:
        return re.sub(r"(?<![\w:/])/(etc/penstock|runs|models|opt/examples)\b", rf"{self.folder}/\1", text)

    def command(self, container: Manifest, *overrides: str) -> list[str]:
        """The command of the container with its environment filled in, without a shell script in front of the
        process."""
        environment = {"POD_NAME": "pod-0", "POD_IP": "10.1.2.3"}
        for variable in container["env"]:
            if "value" in variable:
                environment[variable["name"]] = _expand(variable["value"], environment)
        words = [*container["command"], *container["args"]]
        if words[0] == "/bin/sh":
            assert "exec penstock learner" in words[2]
            words = ["penstock", "learner", *words[4:]]
        assert words[0] == "penstock"
        expanded = [_expand(word, environment) for word in words[1:]]
        return [sys.executable, "-m", "penstock.cli.main", *map(self.moved, expanded), *overrides]


def _expand(text: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], text)


def processes(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Containers by the name of their process, without those of Redis, Ray and the test hook."""
    return {
        container["name"]: container
        for _, template in pod_templates(manifests)
        for container in template["spec"]["containers"]
        if container["name"] in ("gateway", "rollout", "learner", "feed")
    }


def check(pod: PodFolder, container: Manifest, *overrides: str) -> tuple[int, str, str]:
    result = subprocess.run(
        pod.command(container, *overrides, "--check"), capture_output=True, text=True, timeout=120, check=False
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("values", VALUES)
def test_every_process_accepts_its_rendered_config(values: str, tmp_path: Path) -> None:
    manifests = render(values=values)
    pod = PodFolder(tmp_path, manifests)
    config = load_config(pod.folder / "etc/penstock/run.yaml")
    assert config.rollout.engine.name == "vllm"
    found = processes(manifests)
    assert found.keys() == {"gateway", "rollout", "learner"} | ({"feed"} if config.dataset.file else set())
    # The image has vLLM and its node has GPUs, but this machine may have none. A cluster's GPUs are not counted.
    elsewhere = {"rollout": ["--rollout.engine.name=torch"], "learner": ["--learner.ray_address=ray:6379"]}
    for name, container in found.items():
        code, output, error = check(pod, container, *elsewhere.get(name, []))
        assert (code, error) == (0, ""), f"{name}: {error}"
        assert len(output.splitlines()) == 1 and "run.yaml: ok" in output, f"{name}: {output}"


@pytest.mark.parametrize(
    ("process", "override", "complaint"),
    [
        ("gateway", "--gateway.api_key_file=/nowhere", "gateway.api_key_file /nowhere does not exist"),
        ("rollout", "--model.path=/nowhere", "model.path /nowhere is not a model folder"),
        ("rollout", "--rollout.reward.function_file=/nowhere.py", "function_file /nowhere.py does not exist"),
        ("rollout", "--rollout.engine.name=sglang", "sglang is not installed"),
        ("learner", "--weights.cluster_key_file=/nowhere", "weights.cluster_key_file /nowhere cannot be read"),
        ("learner", "--redis.url=http://redis", "must start with redis://"),
        ("learner", "--learner.reward_model.path=/nowhere", "learner.reward_model.path /nowhere is not a model folder"),
        ("learner", "--run_dir=/proc/nowhere", "run_dir /proc/nowhere cannot be written to"),
        ("feed", "--dataset.file=/nowhere.parquet", "dataset /nowhere.parquet does not exist"),
    ],
)
def test_a_check_that_fails_says_why_in_one_line(process: str, override: str, complaint: str, tmp_path: Path) -> None:
    manifests = render(values="no-gpu")
    code, output, error = check(PodFolder(tmp_path, manifests), processes(manifests)[process], override)
    assert code != 0 and output == ""
    assert complaint in error and len(error.splitlines()) == 1
