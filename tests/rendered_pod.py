"""The processes of the rendered chart, as their pods would start them.

A pod's files are made in a folder, with its mounts as sub-folders. Paths in its config and arguments are moved there.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from rendered_chart import ROOT, Manifest, one, pod_templates

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
