"""The packages of images with a GPU: the same CuPy and NCCL, which ranks of one group need, and tested versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PINS = "requirements-cuda.txt"
IMAGES = ["learner", "rollout-vllm", "rollout-sglang"]


def test_cupy_and_nccl_are_pinned_within_the_range_of_the_package() -> None:
    lines = (ROOT / "deploy" / "python" / PINS).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins.keys() == {"cupy-cuda13x", "nvidia-nccl-cu13"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (cupy,) = (Requirement(text) for text in extras["cuda"])
    assert cupy.name in pins and pins[cupy.name] in cupy.specifier


@pytest.mark.parametrize("image", IMAGES)
def test_every_image_with_a_gpu_installs_these_pins_last(image: str) -> None:
    text = (ROOT / "deploy" / "docker" / f"{image}.Dockerfile").read_text()
    stage = text[text.rindex("\nFROM ") :] if image != "learner" else text
    assert f"COPY deploy/python/{PINS} " in stage
    installs = re.findall(r"pip install ([^&]*?)(?=&&|\n(?!\s))", stage)
    assert f"--no-deps -r {'' if image == 'learner' else '/'}{PINS}" in installs[-1]
    assert re.search(r"\[(learner|rollout,agents),cuda,objectstore\]", installs[-2]), "CuPy with its dependencies"


@pytest.mark.parametrize("package", ["ray", "transformers", "peft"])
def test_the_learners_image_has_the_versions_that_are_tested(package: str) -> None:
    text = (ROOT / "deploy" / "docker" / "learner.Dockerfile").read_text()
    variable = f"{package.upper()}_VERSION"
    assert re.search(rf'"{package}(\[default\])?==\$\{{{variable}\}}"', text), "the image installs this version"
    tested = (ROOT / "deploy" / "python" / "requirements.txt").read_text().splitlines()
    assert re.findall(rf"^ARG {variable}=(.+)$", text, re.MULTILINE) == [
        line.split("==")[1] for line in tested if line.startswith(f"{package}==")
    ]
