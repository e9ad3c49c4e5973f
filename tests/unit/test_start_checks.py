"""`--check`: what would fail within a minute of training is found before anything starts, and nothing is written."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main as cli
from penstock.config.loading import dump_config, load_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError, DeadlineExceeded, InvalidInput
from penstock.machine import DiskSpace, write_private
from penstock.start_checks import check_rewards, doubts_about, make_run_folder
from penstock_learner.start_check import check as check_learner
from penstock_rollout.engines.factory import check_devices, check_serves_model
from penstock_rollout.start_check import check as check_rollout
from penstock_tools.local import start_check
from penstock_tools.local.start_check import (
    check_before_start,
    doubts_about_lengths,
    doubts_about_rows,
    first_rows,
)
from penstock_tools.sizing.models import find_shape

DEMO = Path(__file__).parents[2] / "examples" / "arithmetic" / "demo.yaml"
DATA = DEMO.with_name("train.parquet")
NO_FUNCTION = ("--rollout.reward.function_file", "null")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`config("--a.b", "1")` is the demo's config with overrides. Its run folder is not there, and must not be made."""
    monkeypatch.chdir(DEMO.parents[2])
    monkeypatch.setattr("penstock.start_checks.idle_gpus", str)  # this machine may have some
    monkeypatch.setattr(start_check, "CHECK_TIMEOUT_S", 900.0)  # and it may be busy

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


@pytest.mark.parametrize("section", ["dataset", "dataset.validation"])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("data.md", "# Data", "is neither .parquet nor .jsonl"),
        ("data.parquet", "# Data", "cannot be read as Parquet"),
        ("data.jsonl", '{"question": "1+1="}', "prompt"),
    ],
)
def test_a_file_that_is_not_a_dataset(
    section: str, name: str, text: str, message: str, tmp_path: Path, config: Any
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=message):
        check_before_start(config(f"--{section}.file", str(tmp_path / name)))
    if name == "data.jsonl":
        words = ("--dataset.columns.prompt", "question", "--dataset.max_tokens", "8")
        check_before_start(config(f"--{section}.file", str(tmp_path / name), f"--{section}.max_tokens", "8", *words))


def test_an_engine_and_gpus_that_are_not_there(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("penstock_rollout.engines.factory.resolve_engine_name", lambda _: "sglang")
    monkeypatch.setattr("penstock_rollout.start_check.resolve_engine_name", lambda _: "sglang")
    with pytest.raises(ConfigError, match=r"rollout\.engine sglang needs 2 GPUs, but this machine has 1"):
        check_rollout(config("--rollout.engine.tensor_parallel_size", "2"))
    with pytest.raises(ConfigError, match="asks for 4 GPUs, but this machine has 1"):
        check_learner(config("--learner.policy.gpus_per_rank", "2"))


def test_profiles_that_cannot_be_recorded(config: Any) -> None:
    with pytest.raises(ConfigError, match="profile_versions needs rollout.engine.name vllm, not torch"):
        check_rollout(config("--rollout.engine.name", "torch", "--rollout.engine.profile_versions", "[3]"))
    with pytest.raises(ConfigError, match="nsight records GPUs, and no rank has one"):
        check_learner(config("--learner.profile.tool", "nsight", "--learner.profile.steps", "[3]"))


def test_gpus_that_a_cpu_build_leaves_idle_are_named(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = "2 x H200, idle: torch 2.13.0+cpu uses CPUs only; run `make setup GPU=cuda`"
    for module in ("penstock.start_checks", "penstock_learner.roles.ray_cluster", "penstock_rollout.engines.factory"):
        monkeypatch.setattr(f"{module}.idle_gpus", lambda: idle)
    assert doubts_about(config()) == [idle]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=f"asks for 2 GPUs, but this machine has {re.escape(idle)}$"):
        check_learner(config("--learner.policy.gpus_per_rank", "1"))
    with pytest.raises(ConfigError, match=f"sglang needs 1 GPU, but this machine has {re.escape(idle)}$"):
        check_devices("sglang", config().rollout.engine)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="asks for 2 GPUs, but this machine has 1; lower it"):
        check_learner(config("--learner.policy.gpus_per_rank", "1"))


def test_a_model_that_the_engine_would_serve_with_old_weights(tmp_path: Path) -> None:
    for model_type in ("gpt_oss", "qwen3_moe"):
        (tmp_path / model_type).mkdir()
        (tmp_path / model_type / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
    check_serves_model("vllm", tmp_path / "qwen3_moe")
    check_serves_model("torch", tmp_path / "gpt_oss")
    with pytest.raises(ConfigError, match="is of type gpt_oss, whose experts vLLM does not update"):
        check_serves_model("vllm", tmp_path / "gpt_oss")


def test_a_deepseek_without_its_scoring_function_is_refused_for_vllm(tmp_path: Path) -> None:
    """transformers does not write it, and vLLM then takes a softmax: its log-probs differed by 0.23 on a GPU."""
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "deepseek_v3"}')
    check_serves_model("torch", tmp_path)
    with pytest.raises(ConfigError, match="has no scoring_func, so vLLM would choose experts in another way"):
        check_serves_model("vllm", tmp_path)
    config.write_text('{"model_type": "deepseek_v3", "scoring_func": "sigmoid"}')
    check_serves_model("vllm", tmp_path)


def test_nucleus_sampling_in_training_is_doubted(config: Any) -> None:
    assert doubts_about(config("--dataset.file", str(DATA))) == []
    (doubt,) = doubts_about(config("--dataset.file", str(DATA), "--dataset.top_p", "0.9"))
    assert "dataset.top_p is 0.9" in doubt
    words = ("--dataset.validation.file", str(DATA), "--learner.reward_model", f"{{path: {DATA}}}")
    assert doubts_about(config(*words)) == [], "the reward model scores validations too"
    (doubt,) = doubts_about(config("--dataset.file", str(DATA), "--dataset.top_k", "50"))
    assert "dataset.top_k is 50" in doubt


def test_a_group_of_one_is_doubted(config: Any) -> None:
    words = ("--dataset.file", str(DATA), "--dataset.num_samples", "1", "--learner.algorithm.advantage.name")
    (doubt,) = doubts_about(config(*words, "grpo"))
    assert doubt.startswith("dataset.num_samples is 1, so grpo has nothing to compare a response with")
    assert doubts_about(config(*words, "reinforce_plus_plus")) == [], "it compares with the whole batch"
    assert doubts_about(config("--dataset.num_samples", "1")) == [], "clients choose their own"


def test_up_asks_every_process(tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = ["--run_dir", str(tmp_path / "runs")]
    loss = ["--learner.algorithm.loss.name", "nobody.has.this:loss"]
    assert cli.main(["up", str(DEMO), "--check", *folder, *loss, "--rollout.host", "0.0.0.0"]) == 2
    error = capsys.readouterr().err
    assert "learner.algorithm.loss.name: there is no module nobody" in error
    assert "rollout.host 0.0.0.0 is reachable by others" in error


async def found_in_process(file: Path, *names: str) -> list[Any]:
    parts = {name: asyncio.get_running_loop().create_future() for name in names}
    await start_check._check_in_process(file, parts)
    return await asyncio.gather(*parts.values(), return_exceptions=True)


async def test_heavy_checks_share_a_process_and_none_hides_the_others(config: Any, tmp_path: Path) -> None:
    """The code of agents, which comes last, may even end the process."""
    loops = tmp_path / "loops.py"
    loops.write_text("import sys\nsys.exit('the end')\n")
    file, words = tmp_path / "run.yaml", ["--dataset.file", str(DATA), "--dataset.max_tokens", "16"]
    words += ["--rollout.prompt.max_tokens", "2", "--rollout.agents.custom", f"{{own: '{loops}:Own'}}"]
    words += ["--learner.algorithm.loss.name", "no.such:loss"]
    file.write_text(dump_config(config(*words)))
    learner, dataset, server = await found_in_process(file, "learner", "dataset", "rollout server")
    assert isinstance(learner, ConfigError) and "there is no module no" in str(learner)
    assert dataset[0] == "" and "have more than 2 tokens" in dataset[1][0]
    assert isinstance(server, ConfigError) and str(server).endswith("ended early: the end")


async def test_a_check_that_hangs_is_ended(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config()))
    monkeypatch.setattr(start_check, "CHECK_TIMEOUT_S", 0.0)
    (learner,) = await found_in_process(file, "learner")
    assert isinstance(learner, DeadlineExceeded) and "the check of learner did not end in 0 s" in str(learner)


def doubts_about_dataset(config: RunConfig) -> list[str]:
    files = first_rows(config)
    return [*doubts_about_rows(config, files), *doubts_about_lengths(config, files)]


def test_a_dataset_that_servers_would_warn_of_is_doubted(tmp_path: Path, config: Any) -> None:
    assert doubts_about_dataset(config("--dataset.file", str(DATA))) == []
    file = write_rows(tmp_path / "some.jsonl", {"known": "2+2=", "what": "1+1=", "long": "1+" * 15})
    rewards = "{known: {kind: exact_match}, long: {kind: exact_match}}"
    only = ("--dataset.file", str(file), *NO_FUNCTION, "--rollout.reward.by_data_source", rewards)
    (doubt,) = doubts_about_dataset(config(*only))
    assert doubt.startswith("unknown data source 'what'; scoring it with rollout.reward.default")
    _, doubt = doubts_about_dataset(config(*only, "--rollout.prompt.max_tokens", "24"))
    assert doubt.startswith(f"1 of the first 3 prompts of {file} have more than 24 tokens, up to ")
    assert "would be dead-lettered" in doubt
    _, doubt = doubts_about_dataset(
        config(*only, "--rollout.prompt.max_tokens", "24", "--rollout.prompt.overlong", "truncate_left")
    )
    assert "would be truncated" in doubt


def test_a_dataset_without_a_prompt_that_can_be_rendered_is_refused(tmp_path: Path, config: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(config().model.path, model)
    (model / "chat_template.jinja").write_text("{# nothing #}")
    file = write_rows(tmp_path / "some.jsonl", {"known": "2+2=", "what": "1+1="})
    with pytest.raises(
        ConfigError, match=r"^all of the first 2 prompts of .* would be dead-lettered; the first: messa"
    ):
        doubts_about_lengths(
            config("--model.path", str(model), "--dataset.file", str(file)),
            first_rows(config("--dataset.file", str(file))),
        )


def test_rows_whose_reward_has_nothing_to_compare_with_are_doubted(tmp_path: Path, config: Any) -> None:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    words = ("--dataset.file", str(file), *NO_FUNCTION, "--rollout.reward.by_data_source", '{"*": {kind: gsm8k}}')
    (doubt,) = doubts_about_dataset(config(*words))
    assert doubt.startswith(f"2 of the first 2 prompts of {file} have no ground truth")
    assert "name its column in dataset.columns.ground_truth" in doubt
    assert doubts_about_dataset(config(*words, "--dataset.columns.ground_truth", "answer")) == []
    assert doubts_about_dataset(config("--dataset.file", str(file))) == [], "a function may need none"


def test_up_says_what_servers_would_warn_of(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_check, "_check_in_process", _nothing_wrong)
    file = write_rows(tmp_path / "some.jsonl", {"what": "1+1="})
    words = ["--run_dir", str(tmp_path / "runs"), "--dataset.file", str(file), "--dataset.max_tokens", "16"]
    words += NO_FUNCTION
    assert cli.main(["up", str(DEMO), "--check", *words]) == 0
    assert "warning: unknown data source 'what'; scoring it with" in capsys.readouterr().out


def test_a_reward_that_fails_on_every_row_is_wrong(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner and the server find nothing wrong with it: the function can be imported."""
    monkeypatch.setattr(start_check, "_check_in_process", _nothing_wrong)
    file = write_rows(tmp_path / "some.jsonl", {"one": "1+1=", "two": "2+2="})
    reward = reward_file(tmp_path, "def compute_score(extra_info, **_): return extra_info['answer']")
    words = ["--run_dir", str(tmp_path / "runs"), "--dataset.file", str(file), "--dataset.max_tokens", "16"]
    assert cli.main(["up", str(DEMO), "--check", *words, "--rollout.reward.function_file", reward]) == 2
    out, error = capsys.readouterr()
    assert "reward: wrong, rollout.reward fails on each of the 1 rows" in out and "dataset: ok (" in out
    assert error.count("\n") == 1 and "fails on each of the 1 rows that were tried" in error
    assert f"row 1 of {file}, data source 'one', failed (exception): KeyError: 'answer'" in error


def test_rewards_of_agents_are_called_with_what_an_agent_tells_them(config: Any, tmp_path: Path) -> None:
    text = "def compute_score(extra_info, **_): return extra_info['num_turns'] + len(extra_info['tool_rewards'])"
    words = ("--dataset.file", str(DATA), "--rollout.reward.function_file", reward_file(tmp_path, text))
    assert asyncio.run(start_check._call_reward(config(*words))) == ("the reward on 4 rows", [])


def test_a_failed_reward_is_one_line_and_a_slow_one_ends_the_check(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def compute_score(**_): raise ValueError('two\\nlines; and more')"
    words = ("--dataset.file", str(DATA), "--rollout.reward.function_file", reward_file(tmp_path, text))
    with pytest.raises(ConfigError, match="each of the 4 rows .*ValueError: two lines; and more$"):
        asyncio.run(start_check._call_reward(config(*words)))
    monkeypatch.setattr(start_check, "REWARD_S", 0.0)
    assert asyncio.run(start_check._call_reward(config(*words))) == ("", []), "no row was tried in time"


def test_the_address_for_other_machines_is_checked(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of Ray at this address is not up yet, so the learner does not look for it."""
    asked = list[tuple[str, ...]]()

    async def ask(file: Path, parts: Any, *words: str) -> None:
        asked.append((load_config(file).learner.ray_address, *words))
        await _nothing_wrong(file, parts)

    monkeypatch.setattr(start_check, "_check_in_process", ask)
    words = ["up", str(DEMO), "--check", "--run_dir", str(tmp_path / "runs"), "--rollout.num_servers", "0"]
    assert cli.main([*words, "--host", "192.0.2.77"]) == 2
    assert "--host 192.0.2.77 is not an address of this machine" in capsys.readouterr().err
    assert cli.main([*words, "--host", "127.0.0.1", "--learner.ray_address", "127.0.0.1:6380"]) == 0
    assert cli.main([*words, "--learner.ray_address", "127.0.0.1:6380"]) == 0
    assert asked == [("127.0.0.1:6380", "--no-ray"), ("127.0.0.1:6380",)]


def test_the_rows_of_a_loader_are_not_tried_and_up_says_so(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_check, "_check_in_process", _nothing_wrong)
    (tmp_path / "loader.py").write_text("def rows(files): raise AssertionError\n")
    words = ["--run_dir", str(tmp_path / "runs"), "--dataset.file", str(DATA), "--dataset.max_tokens", "16"]
    assert cli.main(["up", str(DEMO), "--check", *words, "--dataset.loader", f"{tmp_path}/loader.py:rows"]) == 0
    (doubt,) = [line for line in capsys.readouterr().out.splitlines() if "loader" in line]
    assert "neither its rows nor the reward on them were tried; read the first samples with `penstock samples" in doubt


def test_a_loader_is_imported_though_it_is_not_called(tmp_path: Path, config: Any) -> None:
    (tmp_path / "rows.py").write_text(
        "from verl.utils.dataset.rl_dataset import RLHFDataset\nclass Rows(RLHFDataset): ..."
    )
    file = write_private(tmp_path / "run.yaml", dump_config(config("--dataset.loader", f"{tmp_path}/rows.py:Rows")))
    [(name, _, _, error)] = start_check.check_here(file, ["dataset"], with_ray=False)
    assert name == "dataset" and error.startswith("dataset.loader: ")
    assert "; write the dataset as a function that returns rows: docs/coming-from-verl.md#porting-classes" in error


def test_up_says_what_it_checked_and_how_large_a_checkpoint_is(
    tmp_path: Path, config: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that fails for an empty response only is not wrong."""
    monkeypatch.setattr(start_check, "_check_in_process", _nothing_wrong)
    file = write_rows(tmp_path / "some.jsonl", {"one": "1+1="})
    reward = reward_file(tmp_path, "def compute_score(solution_str, **_): return float(solution_str)")
    words = ["--run_dir", str(tmp_path / "runs"), "--dataset.file", str(file), "--dataset.max_tokens", "16"]
    assert cli.main(["up", str(DEMO), "--check", *words, "--rollout.reward.function_file", reward]) == 0
    *progress, last = capsys.readouterr().out.splitlines()
    assert progress[:2] == [
        "checking the config, its files and ports", "checking in parallel: rollout server, learner, dataset, reward",
    ]  # fmt: skip
    checked = (
        "rollout server rollout-0, engine vllm; learner asked; up to 1,000 rows of some.jsonl; the reward on 1 row"
    )
    assert checked in last
    assert "; a checkpoint takes about" in last
    num_bytes = 12 * find_shape(str(DEMO.with_name("model"))).num_parameters
    assert f"about {num_bytes / 1e6:.3g} MB" in last, "each parameter with its two moments"


def free_disk(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    disk = DiskSpace(DEMO.parent, num_bytes, size_bytes=10**9)
    monkeypatch.setattr(start_check, "measure_disk", lambda _, needed: replace(disk, needed_bytes=needed))


def test_a_disk_without_room_for_the_checkpoints_that_are_kept(
    tmp_path: Path, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_disk(monkeypatch, 10**7)
    found = config("--run_dir", str(tmp_path))
    text, (doubt,) = start_check.room_for_checkpoints(found)
    assert text.endswith("and 10 MB of disk are free") and "keep 2 needs room for 3 more: free space" in doubt
    for step in (25, 50):
        (found.folder / "checkpoints" / f"term-0001-step-{step:08d}").mkdir(parents=True)
    assert start_check.room_for_checkpoints(found)[1] == [], "one more fits"


@pytest.mark.parametrize("words", [(), ("--check",)], ids=["up", "check"])
def test_a_disk_without_room_for_one_checkpoint_is_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free_disk(monkeypatch, 4 * 10**6)
    assert cli.main(["up", str(DEMO), *words, "--run_dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "a checkpoint takes about 7.15 MB, and 4 MB of disk are free; free space under" in error
    assert error.count("\n") == 1 and not list(tmp_path.iterdir()), "nothing was started"


def test_up_itself_checks_without_torch_and_transformers(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from penstock.cli.main import main
from penstock_tools.local import start_check

printed, is_quick_done = start_check._print_end, asyncio.Event()
left = {"learner, all but its model", "dataset, all but the lengths of prompts", "rollout server", "reward"}

def print_end(name, *words):
    printed(name, *words)
    left.discard(name)
    left or is_quick_done.set()

async def answer(_, parts):
    await is_quick_done.wait()
    print("imported:", *({"torch", "transformers", "vllm", "ray"} & set(sys.modules)))
    for part in parts.values():
        part.set_result(("", []))

start_check._print_end, start_check._check_in_process = print_end, answer
data = ["--dataset.file", sys.argv[2], "--dataset.max_tokens", "16"]
sys.exit(main(["up", sys.argv[1], "--check", "--run_dir", sys.argv[3], *data]))
"""
    words = [sys.executable, "-c", program, str(DEMO), str(DATA), str(tmp_path / "runs")]
    done = subprocess.run(words, cwd=DEMO.parents[2], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.strip().partition(": ok (")[0] for line in done.stdout.splitlines()]
    assert lines.index("imported:") < min(lines.index("learner"), lines.index("dataset"))


async def _nothing_wrong(_: Path, parts: dict[str, asyncio.Future[tuple[str, list[str]]]]) -> None:
    for name, part in parts.items():
        part.set_result((f"{name} asked", []))


def write_rows(file: Path, prompts: dict[str, str]) -> Path:
    """A dataset with one prompt of each data source."""
    rows = [
        {"prompt": [{"role": "user", "content": text}], "data_source": name, "reward_model": {"ground_truth": "4"}}
        for name, text in prompts.items()
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("words", "package"),
    [
        (("--rollout.agents.tools", f"{{search: {{kind: search, index: {DATA}}}}}"), "bm25s"),
        (("--rollout.agents.mcp_servers", "{web: {url: 'http://a/mcp'}}"), "mcp"),
    ],
)
def test_a_package_of_agents_that_is_not_installed(
    words: tuple[str, ...], package: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for check in (check_before_start, check_rollout):
        with pytest.raises(ConfigError) as raised:
            check(config(*words))
        assert f"needs the package {package}; install it with: pip install 'penstock[agents]'" in str(raised.value)
    check_before_start(config(*words, "--rollout.num_servers", "0"))


def test_the_program_of_an_mcp_server_is_checked(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "there")
    with pytest.raises(ConfigError, match=r"mcp_servers\.a\.command: there is no program no-such-program"):
        check_rollout(config("--rollout.agents.mcp_servers", "{a: {command: [no-such-program]}}"))


def test_a_tool_of_verl_with_an_unknown_key(config: Any, tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "search"}}
    entry = {"class_name": "verl.tools.search_tool.SearchTool", "config": {"retrieval_url": "http://a"}}
    file = tmp_path / "tools.yaml"
    file.write_text(json.dumps({"tools": [entry | {"tool_schema": schema}]}))
    with pytest.raises(ConfigError, match=r"tools\.0\.config: unknown key 'retrieval_url'"):
        check_rollout(config("--rollout.agents.tools_file", str(file)))


def test_agents_are_loaded_by_the_check_as_by_the_start(config: Any, tmp_path: Path) -> None:
    tools = ("--rollout.agents.tools", "{code: {kind: python}}")
    with pytest.raises(ConfigError, match="template does not show the model tools; set rollout.agents.show_tools to"):
        check_rollout(config(*tools))
    check_rollout(config(*tools, "--rollout.agents.show_tools", "own"))
    with pytest.raises(ConfigError, match="show_tools: prompt cannot explain calls in the format a:b; set tool_format"):
        check_rollout(config(*tools, "--rollout.agents.show_tools", "prompt", "--rollout.agents.tool_format", "a:b"))
    file = tmp_path / "mine.py"
    file.write_text("from verl.experimental.agent_loop.agent_loop import AgentLoopBase")
    with pytest.raises(ConfigError, match=r"custom\.mine: .*mine\.py fails on import: .*docs/coming-from-verl\.md"):
        check_rollout(config("--rollout.agents.custom", f"{{mine: '{file}:Mine'}}"))


def test_processes_that_start_together_do_not_disturb_each_other(tmp_path: Path) -> None:
    config = load_config(DEMO, ["--run_dir", str(tmp_path / "runs")])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: make_run_folder(config), range(400)))
    assert list(config.folder.iterdir()) == []


@pytest.mark.parametrize("field", ["file", "validation.file"])
def test_the_first_row_of_a_dataset_is_read(field: str, tmp_path: Path, config: Any) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    overrides = [f"--dataset.{field}", str(data), "--dataset.max_tokens", "8", "--dataset.validation.max_tokens", "8"]
    with pytest.raises(InvalidInput, match="data.jsonl line 1: prompt: must be a list"):
        check_before_start(config(*overrides))
    overrides += ["--dataset.columns.prompt", "question", "--dataset.columns.ground_truth"]
    check_before_start(config(*overrides, "answer"))
    with pytest.raises(InvalidInput, match="has no column `anser`; correct dataset.columns.ground_truth"):
        check_before_start(config(*overrides, "anser"))
    data.write_text("")
    with pytest.raises(InvalidInput, match="data.jsonl: has no rows; write some, or name another file"):
        check_before_start(config(*overrides, "answer"))


def test_a_dataset_needs_the_model_s_tokenizer_and_chat_template(tmp_path: Path, config: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(config().model.path, model)
    overrides = ["--model.path", str(model), "--dataset.file", str(DATA), "--dataset.max_tokens", "8"]
    check_before_start(config(*overrides))
    tokenizers = {file: file.read_bytes() for file in model.glob("tokenizer*")}
    for file in tokenizers:
        file.unlink()
    for check in (check_before_start, check_rollout):
        with pytest.raises(ConfigError, match=r"has no tokenizer; copy the model's tokenizer\.json"):
            check(config(*overrides))
    for file, content in tokenizers.items():
        file.write_bytes(content)
    (model / "chat_template.jinja").unlink()
    check_before_start(config("--model.path", str(model)))
    for check in (check_before_start, check_rollout):
        with pytest.raises(ConfigError, match=r"has no chat template, which .* need; put one into .*template.jinja"):
            check(config(*overrides))
    described = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": "{{ messages }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(described))
    check_before_start(config(*overrides))


def test_a_sampler_that_its_file_lacks_is_found(tmp_path: Path, config: Any) -> None:
    file = reward_file(tmp_path, "class Sampler: ...")
    check_before_start(config("--dataset.sampler", f"{file}:Sampler"))
    with pytest.raises(ConfigError, match=r"dataset\.sampler .* does not define Sampeler"):
        check_before_start(config("--dataset.sampler", f"{file}:Sampeler"))
