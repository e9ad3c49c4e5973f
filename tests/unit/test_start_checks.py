"""`--check`: what would fail within a minute of training is found before anything starts, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main as cli
from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock.start_checks import check_rewards, doubts_about
from penstock_learner.start_check import check as check_learner
from penstock_rollout.engines.factory import check_takes_updates
from penstock_rollout.start_check import check as check_rollout
from penstock_services.local.start_check import check_before_start

DEMO = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.yaml"
DATA = DEMO.with_name("train.parquet")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`config("--a.b", "1")` is the demo's config with overrides. Its run folder is not there, and must not be made."""
    monkeypatch.chdir(DEMO.parents[2])

    def make(*overrides: str) -> RunConfig:
        common = ("--run_dir", str(tmp_path / "runs"), "--redis.url", "redis://127.0.0.1:1")
        return load_config(DEMO, [*common, *overrides])

    yield make
    assert not (tmp_path / "runs").exists()


def reward_file(folder: Path, text: str) -> str:
    file = folder / "reward.py"
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(**_): return 0.0",
        "from elsewhere import score as compute_score",
        "from elsewhere import *",
        "try:\n    import fast\n    compute_score = fast.score\nexcept ImportError:\n    compute_score = len",
        "if True:\n    async def compute_score(**_): ...",
    ],
)
def test_a_reward_file_that_defines_the_function(text: str, tmp_path: Path, config: Any) -> None:
    check_rewards(config("--rollout.reward.function_file", reward_file(tmp_path, text)).rollout.reward)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def score(**_):\n    compute_score = 1", "does not define compute_score"),
        ("def compute_score(:", "is not Python"),
    ],
)
def test_a_reward_file_that_does_not(text: str, message: str, tmp_path: Path, config: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        check_before_start(config("--rollout.reward.function_file", reward_file(tmp_path, text)))


def test_a_reward_file_that_cannot_be_loaded(tmp_path: Path, config: Any) -> None:
    text = "import a_module_that_nobody_has\ndef compute_score(**_): return 0.0"
    with pytest.raises(ConfigError, match=r"rollout\.reward: .*a_module_that_nobody_has"):
        check_rollout(config("--rollout.reward.function_file", reward_file(tmp_path, text)))


def test_a_public_gateway_without_a_key(config: Any) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.host 0\.0\.0\.0 is not loopback and needs a key"):
        check_before_start(config("--gateway.host", "0.0.0.0"))


@pytest.mark.parametrize("section", ["dataset", "dataset.validation"])
def test_responses_that_leave_no_room_for_a_prompt(section: str, config: Any) -> None:
    found = config(
        f"--{section}.file", str(DATA), f"--{section}.max_tokens", "64", "--rollout.engine.max_model_len", "64"
    )
    with pytest.raises(ConfigError, match=f"{section}.max_tokens is 64, which leaves no room for a prompt"):
        check_before_start(found)


def test_an_engine_and_gpus_that_are_not_there(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("penstock_rollout.engines.factory.resolve_engine_name", lambda _: "sglang")
    monkeypatch.setattr("penstock_rollout.start_check.resolve_engine_name", lambda _: "sglang")
    with pytest.raises(ConfigError, match=r"rollout\.engine sglang needs 2 GPUs, but this machine has 1"):
        check_rollout(config("--rollout.engine.tensor_parallel_size", "2"))
    with pytest.raises(ConfigError, match="asks for 4 GPUs, but this machine has 1"):
        check_learner(config("--learner.policy.gpus_per_rank", "2"))


def test_a_model_that_the_engine_would_serve_with_old_weights(tmp_path: Path) -> None:
    for model_type in ("gpt_oss", "qwen3_moe"):
        (tmp_path / model_type).mkdir()
        (tmp_path / model_type / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    check_takes_updates("vllm", tmp_path / "qwen3_moe")
    check_takes_updates("torch", tmp_path / "gpt_oss")
    with pytest.raises(ConfigError, match="is of type gpt_oss, whose experts vLLM does not update"):
        check_takes_updates("vllm", tmp_path / "gpt_oss")


def test_nucleus_sampling_in_training_is_doubted(config: Any) -> None:
    assert doubts_about(config("--dataset.file", str(DATA))) == []
    (doubt,) = doubts_about(config("--dataset.file", str(DATA), "--dataset.top_p", "0.9"))
    assert "dataset.top_p is 0.9" in doubt


def test_up_asks_every_process(tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--run_dir", str(tmp_path / "runs")]
    loss = ["--learner.algorithm.loss.name", "nobody.has.this:loss"]
    assert cli.main(["up", str(DEMO), "--check", *folder, *loss, "--rollout.host", "0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert "cannot load loss 'nobody.has.this:loss': No module named 'nobody'" in error
    assert "rollout.host 0.0.0.0 is reachable by others" in error
