"""`penstock init`: what it writes loads, passes the checks of a start, and has the algorithms of the presets."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from penstock.cli import main as cli
from penstock.config.gpu_bundles import num_gpus
from penstock.config.loading import load_config
from penstock_tools.local.processes import divide_gpus
from penstock_tools.starter import ALGORITHMS, Answers, starter_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic"
OPTIONS = (
    "--model", f"{EXAMPLE}/model", "--data", f"{EXAMPLE}/train.parquet", "--validation", f"{EXAMPLE}/heldout.parquet",
    "--reward", f"{EXAMPLE}/reward.py",
)  # fmt: skip


def test_the_file_is_short_and_has_what_was_given(tmp_path: Path) -> None:
    file = tmp_path / "My Run.yaml"
    assert cli.main(["init", str(file), *OPTIONS, "--gpus", "0", "--lr", "1e-4", "--steps", "7"]) == 0
    config = load_config(file)
    assert (config.run, config.model.path, config.dataset.file) == (
        "my-run",
        EXAMPLE / "model",
        EXAMPLE / "train.parquet",
    )
    assert config.dataset.validation.file == EXAMPLE / "heldout.parquet"
    assert config.rollout.reward.function_file == EXAMPLE / "reward.py"
    assert (config.learner.lr, config.learner.num_steps) == (1e-4, 7)
    assert config.rollout.engine.max_model_len == 128, "the model's context"
    sizes = config.replay.groups_per_step, config.dataset.num_samples, config.dataset.max_tokens
    assert sizes == (16, 8, 32), "small, because there is no GPU"
    lines = file.read_text().splitlines()
    assert len(lines) < 60 and sum("#" in line for line in lines) > 10


def test_a_file_is_overwritten_only_by_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mine")
    assert cli.main(["init", str(file), *OPTIONS]) == 2
    assert "--force" in capsys.readouterr().err and file.read_text() == "mine"
    assert cli.main(["init", str(file), *OPTIONS, "--force"]) == 0
    assert load_config(file).run == "run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--model is missing"),
        (("--model", "nowhere"), "model.path nowhere is not a model folder"),
        (("--model", f"{EXAMPLE}/model", "--data", "nowhere.parquet"), "dataset nowhere.parquet does not exist"),
        (
            ("--model", f"{EXAMPLE}/model", "--reward", "gsmk8"),
            "neither a file nor a built-in reward; did you mean gsm8k?",
        ),
        (("--model", f"{EXAMPLE}/model", "--reward", f"{EXAMPLE}/make_data.py"), "does not define compute_score"),
        (("--model", f"{EXAMPLE}/model", "--gpus", "2", "--placement", "standalone"), "needs 3 GPUs"),
        (("--model", f"{EXAMPLE}/model", "--run", "No Name"), "run: "),
    ],
)
def test_nothing_is_written_if_it_could_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert cli.main(["init", str(tmp_path / "run.yaml"), *words]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ids_of_the_hub_are_taken_without_looking_them_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    words = ["--model", "Qwen/Qwen2.5-0.5B-Instruct", "--data", "openai/gsm8k/main/train", "--reward", "gsm8k"]
    assert cli.main(["init", str(tmp_path / "run.yaml"), *words]) == 0
    config = load_config(tmp_path / "run.yaml")
    assert (str(config.model.path), config.rollout.engine.max_model_len) == ("Qwen/Qwen2.5-0.5B-Instruct", 1280)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_that_of_its_preset(name: str, tmp_path: Path) -> None:
    preset = load_config(ROOT / "examples" / "presets" / f"{name}.yaml")
    longest = preset.dataset.max_tokens
    answers = Answers("r", f"{EXAMPLE}/model", f"{EXAMPLE}/train.parquet", algorithm=name, gpus=8, max_tokens=longest)
    (tmp_path / "run.yaml").write_text(starter_config(answers, "run.yaml"))
    made = load_config(tmp_path / "run.yaml")
    assert made.learner.algorithm == preset.learner.algorithm
    for field in ("minibatches_per_step", "critic_warmup_steps", "epochs_per_step"):
        assert getattr(made.learner, field) == getattr(preset.learner, field)
    assert made.learner.needed_roles.keys() == preset.learner.needed_roles.keys()
    assert made.replay.dynamic_sampling == preset.replay.dynamic_sampling
    assert made.dataset.num_samples == preset.dataset.num_samples


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (3, 1), (20, 10), (50, 25), (1000, 25)])
def test_a_checkpoint_and_a_validation_come_before_the_last_step(steps: int, every: int, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    sizes = ("--gpus", "8", "--groups-per-step", "12", "--num-samples", "3", "--algorithm", "dapo")
    assert cli.main(["init", str(file), *OPTIONS, *sizes, "--steps", str(steps)]) == 0
    config = load_config(file)
    assert config.learner.checkpoint.every_steps == config.dataset.validation.every_steps == every
    assert (config.replay.groups_per_step, config.dataset.num_samples) == (12, 3)
    assert config.learner.minibatches_per_step == 12, "not more parts than prompts"
    assert config.learner.warmup_steps <= every


def test_every_preset_can_be_written() -> None:
    assert set(ALGORITHMS) == {path.stem for path in ROOT.glob("examples/presets/*.yaml")}


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "ppo"])
@pytest.mark.parametrize("placement", ["standalone", "split-collocate"])
@pytest.mark.parametrize("gpus", [2, 3, 4, 5, 8])
def test_learner_and_servers_use_the_gpus_and_no_gpu_twice(
    algorithm: str, placement: str, gpus: int, tmp_path: Path
) -> None:
    words = ["--model", f"{EXAMPLE}/model", "--algorithm", algorithm, "--placement", placement, "--gpus", str(gpus)]
    num_roles = len(ALGORITHMS[algorithm].roles)
    fits = placement == "split-collocate" or gpus > num_roles
    assert cli.main(["init", str(tmp_path / "run.yaml"), *words]) == (0 if fits else 2)
    if not fits:
        return
    config = load_config(tmp_path / "run.yaml")
    needed = num_gpus(config.learner.placement, config.learner.needed_roles)
    assert needed + config.rollout.num_servers == gpus
    divided = divide_gpus(config, [str(number) for number in range(gpus)])
    used = [gpu for process in divided.values() for gpu in process["CUDA_VISIBLE_DEVICES"].split(",")]
    assert sorted(used) == [str(number) for number in range(gpus)]
    assert divided.keys() == {"learner", *(f"rollout-{index}" for index in range(config.rollout.num_servers))}


def test_processes_share_one_gpu(tmp_path: Path) -> None:
    assert cli.main(["init", str(tmp_path / "run.yaml"), "--model", f"{EXAMPLE}/model", "--gpus", "1"]) == 0
    config = load_config(tmp_path / "run.yaml")
    assert num_gpus(config.learner.placement, config.learner.needed_roles) == 1
    assert config.rollout.engine.gpu_memory_utilization < 0.5
    assert divide_gpus(config, ["0"]) == {}, "everything sees it"


@pytest.mark.parametrize("reward", ["gsm8k", "math", "code", "exact_match"])
def test_a_built_in_reward_is_for_every_data_source(reward: str, tmp_path: Path) -> None:
    assert cli.main(["init", str(tmp_path / "run.yaml"), "--model", f"{EXAMPLE}/model", "--reward", reward]) == 0
    assert load_config(tmp_path / "run.yaml").rollout.reward.by_data_source["*"].kind == reward


def test_paths_that_yaml_would_misread_are_quoted() -> None:
    model = "a: b/#1 {c}"
    assert yaml.safe_load(starter_config(Answers("r", model), "run.yaml"))["model"]["path"] == model


def test_it_asks_on_a_terminal_and_asks_again_after_a_wrong_answer(tmp_path: Path) -> None:
    """The answers are a model that does not exist, the right one, and the defaults."""
    leader, follower = pty.openpty()
    typed = ["nowhere", f"{EXAMPLE}/model", f"{EXAMPLE}/train.parquet", "", f"{EXAMPLE}/reward.py", "dapo", "0"]
    os.write(leader, ("\n".join(typed) + "\n\n12\n3\n\n\n").encode())
    command = [sys.executable, "-m", "penstock.cli.main", "init", str(tmp_path / "run.yaml")]
    done = subprocess.run(command, stdin=follower, capture_output=True, text=True, timeout=60, check=False)
    os.close(follower)
    os.close(leader)
    assert done.returncode == 0, done.stderr
    assert "nowhere does not exist" in done.stdout and "wrote" in done.stdout
    config = load_config(tmp_path / "run.yaml")
    assert (config.replay.dynamic_sampling, config.dataset.max_tokens, config.learner.lr) == (True, 32, 1e-6)
    assert (config.replay.groups_per_step, config.dataset.num_samples) == (12, 3)
    assert config.dataset.validation.file is None
