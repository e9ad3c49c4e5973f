"""Every process of the rendered chart accepts the command of its pod with `--check`, so that the two stay in line.

The commands run in the test's process, which has imported torch. test_start_checks.py starts the processes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main as cli
from penstock.config.loading import load_config
from support.chart import VALUES, Manifest, PodFolder, needs_helm, processes, render

pytestmark = needs_helm
Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Runs the command of a container with overrides. Returns its exit code, and what it printed."""

    def run(pod: PodFolder, container: Manifest, *overrides: str) -> tuple[int, str, str]:
        capsys.readouterr()
        python, _, module, *words = pod.command(container, *overrides, "--check")
        assert (python, module) == (sys.executable, cli.__name__)
        return (cli.main(words), *capsys.readouterr())

    return run


@pytest.mark.parametrize(
    "values", ["split-collocate", *(pytest.param(v, marks=pytest.mark.long) for v in VALUES if v != "split-collocate")]
)
def test_every_process_accepts_its_rendered_config(values: str, tmp_path: Path, check: Check) -> None:
    manifests = render(values=values)
    pod = PodFolder(tmp_path, manifests)
    config = load_config(pod.folder / "etc/penstock/run.yaml")
    assert config.rollout.engine.name == "vllm"
    found = processes(manifests)
    assert found.keys() == {"gateway", "rollout", "learner"} | ({"feed"} if config.dataset.file else set())
    # The image has vLLM and its node has GPUs, but this machine may have none. A cluster's GPUs are not counted.
    elsewhere = {"rollout": ["--rollout.engine.name=torch"], "learner": ["--no-ray"]}
    for name, container in found.items():
        code, output, error = check(pod, container, *elsewhere.get(name, []))
        assert (code, error) == (0, ""), f"{name}: {error}"
        assert len(output.splitlines()) == 1 and "run.yaml: ok" in output, f"{name}: {output}"


@pytest.mark.parametrize(
    ("process", "override", "complaint"),
    [
        ("gateway", "--gateway.api_key_file=/nowhere", "gateway.api_key_file /nowhere does not exist"),
        ("rollout", "--model.path=/nowhere", "model.path /nowhere is not a model folder"),
        ("learner", "--weights.cluster_key_file=/nowhere", "weights.cluster_key_file /nowhere cannot be read"),
        ("feed", "--dataset.file=/nowhere.parquet", "dataset /nowhere.parquet does not exist"),
    ]
    + [
        pytest.param(*case, marks=pytest.mark.long)
        for case in [
            ("rollout", "--rollout.reward.function_file=/nowhere.py", "function_file /nowhere.py does not exist"),
            ("rollout", "--rollout.engine.name=sglang", "sglang is not installed"),
            ("learner", "--redis.url=http://redis", "must start with redis://"),
            ("learner", "--learner.reward_model.path=/nowhere", "reward_model.path /nowhere is not a model folder"),
            ("learner", "--run_dir=/proc/nowhere", "run_dir /proc/nowhere cannot be written to"),
        ]
    ],
)
def test_a_check_that_fails_says_why_in_one_line(
    process: str, override: str, complaint: str, tmp_path: Path, check: Check
) -> None:
    manifests = render(values="no-gpu")
    code, output, error = check(PodFolder(tmp_path, manifests), processes(manifests)[process], override)
    assert code != 0 and output == ""
    assert complaint in error and len(error.splitlines()) == 1
