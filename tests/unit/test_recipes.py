"""The recipes of `examples/recipes`: their data is prepared offline, their commands fit on the hardware that their
pages name, their rewards give full marks to right answers, and tiny versions of them run."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from prometheus_client import CollectorRegistry

from examples.recipes import tiny
from penstock.cli import main as cli
from penstock.config.gpu_bundles import num_gpus
from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.feed.datasets import read_prompts
from penstock.trajectory import Sampling
from penstock_learner.start_check import check as check_learner
from penstock_rollout.metrics import RolloutMetrics
from penstock_rollout.rewards.scorer import Scorer
from penstock_rollout.start_check import check as check_rollout
from penstock_tools.local.start_check import check_before_start

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
CONFIGS = sorted(RECIPES.glob("*/*.yaml"))
NAMES = sorted({file.parent.name for file in CONFIGS})
ROW = re.compile(r"^\| (.+) \| (.+) \| (\d+) x (\w+) \| `penstock up (\S+) ?(.*)` \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A row of a recipe's page: what it says, and its command."""

    model: str
    placement: str
    num_gpus: int
    gpu: str
    file: Path
    overrides: tuple[str, ...]

    def load(self, *overrides: str) -> RunConfig:
        return load_config(self.file, [*self.overrides, *overrides])


ROWS = [
    Row(model, placement, int(count), gpu, ROOT / file, tuple(shlex.split(overrides)))
    for name in NAMES
    for model, placement, count, gpu, file, overrides in ROW.findall((RECIPES / name / "README.md").read_text())
]


def _named(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def _named_row(row: Row) -> str:
    return f"{_named(row.file)}-{row.model.partition(',')[0]}-{row.placement}"


def _long(values: Sequence[Any]) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


def test_every_recipe_has_both_placements_a_page_and_tiny_data() -> None:
    assert sorted(tiny.COPIES) == NAMES
    index = (ROOT / "examples" / "README.md").read_text()
    for name in NAMES:
        rows = [row for row in ROWS if row.file.parent.name == name]
        page = (RECIPES / name / "README.md").read_text()
        assert f"recipes/{name}/README.md" in index
        assert {row.file for row in rows} == set((RECIPES / name).glob("*.yaml"))
        assert {row.placement for row in rows} == {"standalone", "split-collocate"}
        assert len(rows) == page.count(" x h100 |")
        assert "not yet measured" in page or (RECIPES / name / "curve.png").exists()


@pytest.mark.parametrize("row", ROWS, ids=_named_row)
def test_a_command_is_what_its_row_says_and_fits_on_its_hardware(row: Row, capsys: pytest.CaptureFixture[str]) -> None:
    config = row.load()
    assert config.model.path.name == row.model.partition(",")[0] and config.learner.placement == row.placement
    assert cli.main(["plan", "--config", str(row.file), "--gpu", row.gpu, *row.overrides]) == 0
    text = capsys.readouterr().out
    assert "does not fit" not in text
    servers = config.rollout.num_servers * config.rollout.engine.tensor_parallel_size
    needed = num_gpus(config.learner.placement, config.learner.needed_roles) + servers
    assert needed == row.num_gpus or (row.num_gpus == 1 and "both on one GPU" in text)


def test_rows_that_train_other_models_have_other_runs() -> None:
    models = {(row.load().run, row.load().model.path) for row in ROWS}
    assert len({run for run, _ in models}) == len(models)


def test_a_plan_for_a_file_that_extends_another_is_a_whole_config(tmp_path: Path) -> None:
    file, placed = RECIPES / "gsm8k" / "ppo.yaml", tmp_path / "placed.yaml"
    assert cli.main(["plan", "--gpus", "8", "--config", str(file), "--write", str(placed)]) == 0
    assert "extends" not in placed.read_text()
    config = load_config(placed)
    assert config.dataset == load_config(file).dataset and config.learner.critic is not None


# ── data and rewards ──

ANSWERS: dict[str, Callable[[Any], str]] = {
    "gsm8k": lambda truth: f"So it is\n#### {truth}",
    "math_dapo": lambda truth: f"So it is.\nAnswer: {truth}",
    "retool": lambda truth: f"The program printed {truth}.\nAnswer: {truth}",
    "countdown": lambda truth: f"<answer>{' + '.join(map(str, json.loads(truth)['numbers']))}</answer>",
    "search_r1": lambda truth: f"<answer>{truth['target'][0]}</answer>",
    "smollm2": lambda truth: f"So it is\n#### {truth}",
    "code_tests": lambda truth: f"```python\n{_program(json.loads(truth))}\n```",
}


def _program(truth: dict[str, Any]) -> str:
    if "assert_case" in truth:
        added = int(truth["assert_case"][0].rpartition("== ")[2]) - 1
        return f"def f(x):\n    return x + {added}"
    return f"print(int(input()) + {int(truth['outputs'][0]) - 1})"


@pytest.mark.parametrize("name", ["code_tests", *_long(sorted(ANSWERS.keys() - {"code_tests"}))])
async def test_right_answers_to_prepared_rows_have_full_marks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    tiny.prepare(name, tmp_path)
    config = load_config(next(iter(sorted((RECIPES / name).glob("*.yaml")))))
    held_out = Path(config.dataset.validation.file).name  # type: ignore[arg-type]
    scorer = Scorer(config.rollout.reward, RolloutMetrics(CollectorRegistry()))
    try:
        for file in (tmp_path / "train.parquet", tmp_path / held_out):
            prompts = list(read_prompts(file, num_samples=1, sampling=Sampling(max_tokens=8)))
            assert len(prompts) == pq.read_metadata(file).num_rows > 0
            assert {prompt.agent_name for prompt in prompts} <= {"tool_agent", "single_turn_agent", ""}
            row = pq.read_table(file).to_pylist()[0]
            truth = row["reward_model"]["ground_truth"]
            texts = [ANSWERS[name](truth), "I do not know."]
            right, wrong = await scorer.score("p", row["data_source"], texts, truth, row["extra_info"])
            assert right.reward == 1 and wrong.reward <= 0
    finally:
        await scorer.close()


def test_repeated_problems_are_written_once(tmp_path: Path) -> None:
    tiny.prepare("math_dapo", tmp_path)
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 24
    assert pq.read_metadata(tmp_path / "aime2024.parquet").num_rows == 4


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("(1 + 2) * 3", 1),
        ("3 * (2 + 1)", 1),
        ("9", 0.1),
        ("1 + 2 * 3", 0.1),
        ("3 ** 2", 0.1),
        ("9 / 0", 0.1),
        ("", 0.1),
    ],
)
def test_countdown_takes_each_number_once(answer: str, score: float) -> None:
    reward = importlib.import_module("examples.recipes.countdown.reward")
    truth = json.dumps({"numbers": [1, 2, 3], "target": 9})
    assert reward.compute_score("countdown", f"so <answer>{answer}</answer>", truth)["score"] == score


def test_a_copy_without_the_files_is_named(tmp_path: Path) -> None:
    prepare = importlib.import_module("examples.recipes.gsm8k.prepare")
    with pytest.raises(SystemExit, match="has no main/train-"):
        prepare.main(["--from", str(tmp_path), "--out", str(tmp_path / "out")])


# ── tiny versions ──


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny.make_model(folder)
    return folder


def _tiny(file: Path, folder: Path, model: Path) -> Path:
    """The tiny version of a config, with a model that was made before."""
    (folder / "model").symlink_to(model)
    return tiny.make_tiny(file.parent.name, file, folder)


FIRST = [next(iter(sorted((RECIPES / name).glob("*.yaml")))) for name in NAMES]
"""One config of each recipe."""


@pytest.mark.parametrize(
    "file", [*FIRST[::4], *_long([file for file in CONFIGS if file not in FIRST[::4]])], ids=_named
)
def test_a_tiny_version_passes_the_checks(
    file: Path, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(_tiny(file, tmp_path, tiny_model))
    check_before_start(config)
    real = load_config(file)
    assert config.learner.algorithm.advantage == real.learner.algorithm.advantage
    assert config.rollout.reward == real.rollout.reward


def _check_real(row: Row, folder: Path, model: Path) -> None:
    """What `penstock up --check` does with a row, where there are GPUs, with another model and its data."""
    tiny.prepare(row.file.parent.name, folder)
    config = row.load()
    held_out = Path(config.dataset.validation.file).name  # type: ignore[arg-type]
    index = ("--rollout.agents.tools.search.index", str(folder / "copies" / "wiki.jsonl"))
    words = (
        "--model.path", str(model), "--dataset.file", str(folder / "train.parquet"), "--run_dir", str(folder / "runs"),
        "--dataset.validation.file", str(folder / held_out), "--redis.url", "redis://127.0.0.1:1",
    )  # fmt: skip
    config = row.load(*words, *(index if "search" in config.rollout.agents.tools else ()))
    check_before_start(config)
    check_learner(config)
    check_rollout(config)


@pytest.mark.parametrize("row", [ROWS[0], *_long(ROWS[1:])], ids=_named_row)
def test_a_command_passes_the_checks_of_every_process(
    row: Row, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("torch.cuda.device_count", lambda: row.num_gpus)
    _check_real(row, tmp_path, tiny_model)


@pytest.mark.long
def test_a_tiny_model_answers_and_is_scored(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = _tiny(RECIPES / "gsm8k" / "grpo.yaml", tmp_path, tiny_model)
    out = tmp_path / "answers.parquet"
    words = ["--config", str(file), "--output", str(out), "--n", "2", "--max-tokens", "8", "--limit", "2", "--score"]
    assert cli.main(["generate", str(tmp_path / "test.parquet"), *words]) == 0
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == 2 and all(len(row["responses"]) == len(row["rewards"]) == 2 for row in rows)


@pytest.mark.long
@pytest.mark.timeout(700)
@pytest.mark.parametrize("file", FIRST, ids=_named)
def test_a_tiny_version_trains(file: Path, tmp_path: Path, tiny_model: Path) -> None:
    made = _tiny(file, tmp_path, tiny_model)
    command = [sys.executable, "-m", "penstock.cli.main", "up", str(made)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = load_config(made).folder
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["num_sequences"] > 0 for step in steps)
    assert (folder / "validation.jsonl").read_text().count("\n") >= 2
