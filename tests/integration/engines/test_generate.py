"""`penstock generate` as a process: after a kill it continues, and the result is the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from penstock.cli import main as cli

ARITHMETIC = Path(__file__).parents[3] / "examples" / "arithmetic"
MODEL = ARITHMETIC / "model"
EOS_TOKEN_ID = 1
NUM_PROMPTS = 300
TOO_LONG = 5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Additions, one of which is too long for the model."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    rows = parquet.read_table(ARITHMETIC / "heldout.parquet").slice(0, NUM_PROMPTS).to_pylist()
    rows[TOO_LONG]["prompt"][0]["content"] = "1+1=" * 30
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(dataset: Path, output: Path, *more: str, model: Path = MODEL) -> list[str]:
    return [
        sys.executable, "-m", "penstock.cli.main", "generate", str(dataset), "--model", str(model), "--engine", "torch",
        "--output", str(output), "--n", "3", "--max-tokens", "8", "--seed", "11", "--concurrency", "8",
        "--rollout.engine.max_model_len", "64", *more,
    ]  # fmt: skip


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


def run_here(words: list[str], capsys: pytest.CaptureFixture[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has imported what it needs."""
    capsys.readouterr()
    try:
        code = cli.main(words[words.index("generate") :])
    except SystemExit as end:
        code = int(end.code or 0)
    shown = capsys.readouterr()
    return subprocess.CompletedProcess(words, code, shown.out, shown.err)


def kill_midway(words: list[str], parts: Path, number: signal.Signals) -> int:
    """End the process once it has written a part. Returns its exit code."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while not list(parts.glob("part-*.parquet")) and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        return process.wait(timeout=120)
    finally:
        process.kill()
        process.wait()


def reproducible(output: Path) -> list[list[Any]]:
    """The columns that do not depend on which rows were decoded together."""
    columns = ("row", "responses", "token_ids", "finish_reasons", "prompt", "reward_model", "extra_info", "error")
    return [[row[name] for name in columns] for row in answers(output)]


def answers(output: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = parquet.read_table(output).to_pylist()
    return rows


@pytest.mark.long
def test_a_killed_generation_continues_with_what_is_missing(dataset: Path, tmp_path: Path) -> None:
    output, parts = tmp_path / "killed.parquet", tmp_path / "killed.parquet.parts"
    words = command(dataset, output)
    assert kill_midway(words, parts, signal.SIGKILL) == -signal.SIGKILL
    kept = {row for part in parts.glob("part-*.parquet") for row in parquet.read_table(part)["row"].to_pylist()}
    assert 0 < len(kept) < NUM_PROMPTS and not output.exists()
    done = run(words)
    assert done.returncode == 0, done.stderr
    assert f"{NUM_PROMPTS} prompts, {3 * (NUM_PROMPTS - 1)} samples" in done.stdout
    assert f"; {len(kept)} prompts had been answered before" in done.stdout
    assert "1 prompts have no samples" in done.stdout
    log = parts / "logs" / "engine-0.log"
    begun, *others = done.stderr.splitlines()
    assert begun == f"starting the engine; its log: {log}"
    assert all(line.startswith(("ready after ", "generating: ", f"WARNING: row {TOO_LONG} has no")) for line in others)

    straight = run(command(dataset, tmp_path / "straight.parquet"))
    assert straight.returncode == 0, straight.stderr
    assert reproducible(output) == reproducible(tmp_path / "straight.parquet")


def test_shards_and_servers_make_the_answers_of_one_process(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few, whole, sharded = ("--limit", "50"), tmp_path / "whole.parquet", tmp_path / "sharded.parquet"
    assert run_here(command(dataset, whole, *few), capsys).returncode == 0
    first = run_here(command(dataset, sharded, *few, "--shard", "1/3"), capsys)
    assert first.returncode == 0 and "17 of 50 prompts" in first.stdout
    assert "not answered yet: 17 of shard 0/3, 16 of shard 2/3; the shard that ends last" in first.stdout
    assert run_here(command(dataset, sharded, *few, "--shard", "0/2"), capsys).returncode == 0
    last = run_here(command(dataset, sharded, *few, "--shard", "1/2"), capsys)
    assert last.returncode == 0 and "50 of 50 prompts, 147 samples" in last.stdout
    assert reproducible(sharded) == reproducible(whole)

    done = run_here(command(dataset, tmp_path / "servers.parquet", *few, "--servers", "2"), capsys)
    assert done.returncode == 0, done.stderr
    assert "50 of 50 prompts, 147 samples" in done.stdout and "with the start of the engines" in done.stdout
    assert reproducible(tmp_path / "servers.parquet") == reproducible(whole)
    assert not (tmp_path / "servers.parquet.parts").exists()


def test_answers_hold_what_scoring_and_training_need(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--score`, an interrupted command keeps its finished rows, and a finished one has nothing to do."""
    output = tmp_path / "a.parquet"
    words = command(
        dataset, output, "--score", "--rollout.reward.function_file", str(ARITHMETIC / "reward.py"),
    )  # fmt: skip
    assert kill_midway(words, tmp_path / "a.parquet.parts", signal.SIGTERM) == 130
    done = run_here(words, capsys)
    assert done.returncode == 0, done.stderr
    rows = answers(output)
    assert [row["row"] for row in rows] == list(range(NUM_PROMPTS))
    assert "120 tokens are more than 63" in rows[TOO_LONG]["error"] and not rows[TOO_LONG]["responses"]
    answered = [row for row in rows if row["row"] != TOO_LONG]
    assert sum(len(set(row["responses"])) > 1 for row in answered) > NUM_PROMPTS / 2, "samples have seeds of their own"
    for row in answered:
        for text, ids, log_probs, mask, reason, reward in zip(
            row["responses"], row["token_ids"], row["log_probs"], row["loss_masks"], row["finish_reasons"],
            row["rewards"], strict=True,
        ):  # fmt: skip
            assert len(ids) == len(log_probs) == len(mask) and set(mask) == {1}
            assert all(value <= 0 for value in log_probs)
            assert (ids[-1] == EOS_TOKEN_ID) == (reason == "stop")
            assert (reward == 1) == (text == row["reward_model"]["ground_truth"])
    assert any(reward == 1 for row in answered for reward in row["rewards"])
    again = run_here(words, capsys)
    assert again.returncode == 0 and f"; {NUM_PROMPTS} prompts had been answered before" in again.stdout
    assert "tokens/s" not in again.stdout, "no engine was started"
    other = run_here([*words, "--rollout.engine.max_model_len", "32"], capsys)
    assert other.returncode == 2 and "holds answers with engine 'torch, max_model_len 64" in other.stderr


@pytest.mark.long
def test_vllm_answers_and_ends_well(dataset: Path, tmp_path: Path) -> None:
    """A signal ends its EngineCore. The command itself must not react to it."""
    output = tmp_path / "a.parquet"
    done = run(command(dataset, output, "--engine", "vllm", "--limit", "5"))
    assert done.returncode == 0, done.stderr
    starts = ("starting the engine", "ready after", "generating: ")
    assert all(line.startswith(starts) for line in done.stderr.splitlines()), "what vLLM prints is in its log"
    assert "5 prompts, 15 samples" in done.stdout and "Traceback" not in done.stderr
    assert [len(row["responses"]) for row in answers(output)] == [3] * 5


def test_prompts_are_cut_where_the_config_says_so(dataset: Path, tmp_path: Path) -> None:
    output = tmp_path / "a.parquet"
    words = command(dataset, output, "--limit", str(TOO_LONG + 1), "--rollout.prompt.overlong", "truncate_left")
    assert cli.main(words[words.index("generate") :]) == 0
    assert [(len(row["responses"]), row["error"]) for row in answers(output)] == [(3, None)] * (TOO_LONG + 1)


def test_columns_have_the_names_that_the_config_gives_them(tmp_path: Path) -> None:
    file, output = tmp_path / "questions.jsonl", tmp_path / "a.parquet"
    file.write_text('{"question": "1+1=", "answer": "2"}\n')
    columns = ("--dataset.columns", "{prompt: question, ground_truth: answer}", "--dataset.data_source", "my/sums")
    words = command(file, output, *columns)
    assert cli.main(words[words.index("generate") :]) == 0
    [row] = answers(output)
    assert (row["prompt"], row["data_source"]) == ([{"role": "user", "content": "1+1="}], "my/sums")
    assert row["reward_model"] == {"ground_truth": "2"} and len(row["responses"]) == 3


def test_errors_are_one_line(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "a.parquet"
    for words, why in (
        (command(tmp_path / "no.parquet", output), "is not a file; check the path"),
        (command(dataset, output, model=tmp_path), "is not a model folder"),
        (command(dataset, tmp_path / "no" / "a.parquet"), "there is no folder"),
        (command(dataset, output, "--engine", "vlm"), "rollout.engine.name"),
    ):
        done = run_here(words, capsys)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("penstock: error: ") and done.stderr.count("\n") == 1
        assert why in done.stderr
