"""`penstock evaluate` scores by data source, computes pass@k, writes the file, and refuses unusable input."""

from __future__ import annotations

import errno
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.cli import main as cli
from penstock.sample_scores import PromptSamples, pass_at_k, summarise

ROWS: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6*7?"}],
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"index": 0},
        "responses": ["#### 42", "#### 41", "no", "#### 42"],
    },
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "6*8?"}],
        "reward_model": {"ground_truth": "48"},
        "extra_info": None,
        "responses": ["#### 1", "#### 2", "#### 3", "#### 4"],
    },
    {
        "data_source": "mine",
        "prompt": [{"role": "user", "content": "say a"}],
        "reward_model": {"ground_truth": "a"},
        "extra_info": {"index": 2},
        "responses": ["a", "b"],
    },
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_scores_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "answers.parquet", ROWS)
    assert cli.main(["evaluate", str(path), "--json", "--rollout.reward.num_processes", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    gsm8k = shown["data_sources"]["openai/gsm8k"]
    assert gsm8k["mean"] == pytest.approx((1 + 0.1 + 0 + 1 + 4 * 0.1) / 8)
    assert gsm8k["pass_at"] == {"1": pytest.approx(0.25), "2": pytest.approx(5 / 12), "4": 0.5}
    assert shown["data_sources"]["mine"] == {
        "num_prompts": 1, "num_samples": 2, "mean": 0.5, "pass_at": {"1": 0.5, "2": 1.0}, "parts": {},
    }  # fmt: skip
    assert shown["reward_errors"] == {}

    written = pq.read_table(shown["output"]).to_pylist()
    assert [row["scores"] for row in written] == [[1.0, 0.1, 0.0, 1.0], [0.1] * 4, [1.0, 0.0]]
    assert [{key: row[key] for key in ROWS[0]} for row in written] == ROWS
    assert sorted(file.name for file in tmp_path.iterdir()) == ["answers.parquet", "answers.scored.parquet"]


def test_the_table_names_every_source_and_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): 1/0")
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {{path: m}}\nrollout: {{reward: {{function_file: {tmp_path / 'reward.py'}}}}}\n")
    path = write(tmp_path / "answers.parquet", ROWS[2:])
    assert cli.main(["evaluate", str(path), "--config", str(config), "--output", str(tmp_path / "out.parquet")]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown and "2 rewards failed (2 exception)" in shown
    assert pq.read_table(tmp_path / "out.parquet").column("scores").to_pylist() == [[0.0, 0.0]]


def test_pass_at_k_of_a_part_of_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': 0.5, 'acc': float(solution_str == ground_truth), '[/b]': len(solution_str)}\n"
    )
    path = write(tmp_path / "answers.parquet", ROWS[2:])
    words = ["evaluate", str(path), "--rollout.reward.function_file", str(tmp_path / "reward.py")]
    assert cli.main([*words, "--json", "--score", "acc"]) == 0
    mine = json.loads(capsys.readouterr().out)["data_sources"]["mine"]
    assert (mine["mean"], mine["pass_at"]) == (0.5, {"1": 0.5, "2": 1.0})
    assert mine["parts"] == {"score": 0.5, "acc": 0.5, "[/b]": 1.0}
    assert cli.main(words) == 0
    header, row, _ = capsys.readouterr().out.splitlines()
    assert header.split()[4:] == ["mean", "pass@1", "pass@2", "[/b]", "acc", "score"]
    assert row.split()[3:] == ["0.5", "0", "0", "1", "0.5", "0.5"]
    assert cli.main([*words, "--score", "accuracy"]) == 2
    assert "--score: no reward has a part 'accuracy'; the parts are [/b], acc, score" in capsys.readouterr().err


def test_a_row_may_hold_one_response_in_another_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"data_source": "mine", "reward_model": {"ground_truth": "a"}, "answer": answer} for answer in "aab"]
    path = write(tmp_path / "answers.parquet", rows)
    assert cli.main(["evaluate", str(path), "--response-column", "answer", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["data_sources"]["mine"]["mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("has_verl_columns", [False, True], ids=["the run's columns", "those of generate"])
def test_columns_and_data_source_are_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], has_verl_columns: bool
) -> None:
    config = tmp_path / "run.yaml"
    columns = "{prompt: question, ground_truth: answer}"
    config.write_text(f"model: {{path: m}}\ndataset: {{file: openai/gsm8k/main/train, columns: {columns}}}\n")
    truth: dict[str, Any] = {"reward_model": {"ground_truth": "42"}} if has_verl_columns else {"answer": "#### 42"}
    path = write(tmp_path / "answers.parquet", [truth | {"responses": ["#### 42", "#### 41"]}])
    assert cli.main(["evaluate", str(path), "--config", str(config), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["data_sources"]
    assert found["openai/gsm8k"]["mean"] == pytest.approx((1 + 0.1) / 2)


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (None, [], "is not a file"),
        ([{"prompt": "x"}], [], "no column `responses`, only prompt; give --response-column"),
        ([{"responses": [1, 2]}], [], "row 0: responses: must be text"),
        ([{"responses": ["a"], "reward_model": "a"}], [], "row 0: reward_model: must be an object, not str"),
        ([{"responses": ["a"], "data_source": 3}], [], "row 0: data_source: must be text, not int"),
        ([{"responses": ["a"], "extra_info": "a"}], [], "row 0: extra_info: must be an object, not str"),
        (ROWS, ["--rollout.reward.num_proceses", "1"], "did you mean 'num_processes'"),
        (ROWS, ["--rollout.reward.function_file", "absent.py"], "there is no file absent.py"),
    ],
)
def test_unusable_input_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: Any, words: list[str], message: str
) -> None:
    path = tmp_path / "answers.parquet"
    if rows is not None:
        write(path, rows)
    assert cli.main(["evaluate", str(path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.glob("*.scored*"))


@pytest.mark.parametrize(("num_samples", "num_passed"), [(5, 0), (5, 2), (5, 5), (8, 1)])
def test_pass_at_k_is_the_share_of_choices_with_a_pass(num_samples: int, num_passed: int) -> None:
    samples = [index < num_passed for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        choices = list(combinations(samples, k))
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))
    with pytest.raises(ValueError, match="needs at least 9 samples"):
        pass_at_k(8, 1, 9)


def test_the_summary_uses_no_more_samples_than_every_prompt_has() -> None:
    summary = summarise([PromptSamples("", rewards) for rewards in ((1.0, 0.0, 0.0), (1.0,) * 6, ())])
    assert (summary.num_prompts, summary.num_samples, list(summary.pass_at)) == (2, 9, [1, 2, 3])
    assert summarise([]).pass_at == {} and summarise([]).mean == 0.0


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "answers.parquet", ROWS)
    output = tmp_path / "nowhere" / "scores.parquet"
    assert cli.main(["evaluate", str(path), "--output", str(output)]) == 2
    assert f"{output}: cannot be written (No such file or directory)" in capsys.readouterr().err


def test_a_full_disk_is_not_taken_for_an_unreadable_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_batch(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path, output = write(tmp_path / "answers.parquet", ROWS[2:]), tmp_path / "out.parquet"
    monkeypatch.setattr(pq.ParquetWriter, "write_batch", write_batch)
    assert cli.main(["evaluate", str(path), "--output", str(output)]) == 2
    assert f"{output}: cannot be written (No space left on device); give --output" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
