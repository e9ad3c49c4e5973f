"""`penstock queue` on a real Redis: inspection, dead letters, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main as cli
from penstock.codec import encode_group, encode_prompt
from penstock.config.loading import dump_config
from penstock.replay.queue import RedisReplayQueue
from penstock.trajectory import Prompt, VersionSegment
from support.groups import make_group
from support.learner_runs import make_config
from support.queue_tools import Tools, operator_tools, recording_file, rich_group  # noqa: F401 the fixtures
from support.scripted_engines import END, make_tokenizer_folder, spelled

# ── looks ──


def test_stat_counts_every_place_and_checks_conservation(tools: Tools) -> None:
    tools.fill([replace(make_group(i), finished_at_ms=1) for i in range(5)])
    tools.deliver(2)
    tools.dead_letter([b"", b""], "engine_error: out of memory")
    tools.on(lambda queue: queue.submit([b"a", b"b", b"c"], [0] * 3, ""))
    tools.on(lambda queue: queue.lease("rollout-0", 1))
    report = tools.json("stat")
    places = {place["name"]: place for place in report["places"]}
    counts = {name: place["count"] for name, place in places.items() if place["count"]}
    assert counts == {"pending": 2, "leased": 1, "ready": 3, "delivered": 2, "dead letters": 2}
    assert places["ready"]["num_bytes"] > 0 and places["delivered"]["num_bytes"] > 0
    assert places["ready"]["oldest_age_s"] > 1e9 and 0 <= places["dead letters"]["oldest_age_s"] < 600
    assert (report["admitted"], report["conservation_error"]) == (8, 0)
    assert report["dead_letter_reasons"] == {"engine_error": 2}
    shown = tools("stat")
    assert "conservation ok" in shown and "engine_error" in shown and "dead letters" in shown


def test_peek_shows_the_next_groups_and_takes_nothing(tools: Tools) -> None:
    groups = [make_group(i, version=i) for i in range(4)]
    tools.fill(groups)
    first, second = tools.json("peek", "--limit", "2")
    assert (first["prompt_id"], second["prompt_id"]) == (1, 2)
    assert (first["server_id"], second["min_version"], second["max_version"]) == ("rollout-0", 1, 1)
    assert first["num_response_tokens"] == groups[0].num_response_tokens
    assert first["mean_reward"] == groups[0].mean_reward
    assert "rollout-0" in tools("peek")
    assert tools.stat().queued == 4 and tools.stat().delivered == 0


def test_peek_shows_one_group_in_full(tools: Tools) -> None:
    group = rich_group(3)
    tools.fill([group])
    shown = tools.json("peek", "--prompt-id", "1")
    for trajectory, record in zip(group.trajectories, shown["trajectories"], strict=True):
        assert record["token_ids"] == trajectory.token_ids.tolist()
        assert record["log_probs"] == trajectory.log_probs.tolist()
        assert record["policy_versions"] == trajectory.token_versions().tolist()
        assert record["reward_parts"] == trajectory.reward_parts
    assert "log-prob" in tools("peek", "--prompt-id", "1", "--tokens")
    assert "no group of prompt 9 is queued" in tools("peek", "--prompt-id", "9", code=1)


def test_peek_shows_text_where_the_tokenizer_is_known(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(0)
    words = [np.array([*spelled(text), END], dtype=np.int32) for text in ("five", "5")]
    trajectories = tuple(
        replace(
            group.trajectories[0], token_ids=ids, loss_mask=np.ones(len(ids), np.uint8),
            log_probs=np.zeros(len(ids), np.float32), segments=(VersionSegment(0, len(ids), 3),),
        )
        for ids in words
    )  # fmt: skip
    tools.fill([replace(group, trajectories=trajectories)], Prompt(messages=(("user", "2 + 3?"),), ground_truth=5))
    config = make_config(tmp_path / "runs", make_tokenizer_folder(tmp_path / "model"), tools.url, tools.run)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["queue", "peek", "--prompt-id", "1"]) == 0
    lines = [" ".join(line.split()) for line in tools.capsys.readouterr().out.splitlines()]
    assert {"user 2 + 3?", "truth 5", "response five<|end|>", "response 5<|end|>"} <= set(lines)
    assert len(lines) < 15, "not a row for each token"
    assert max(map(len, lines)) <= 80
    tools("peek", "--prompt-id", "1")  # without a config: ids stand for text


def test_a_group_that_cannot_be_decoded_is_shown_and_not_exported(tools: Tools, recording: Path) -> None:
    async def poison(queue: RedisReplayQueue) -> None:
        await queue.submit([b""], [0], "")
        [lease] = await queue.lease("rollout-0", 1)
        await queue.append(lease, b"garbage", 0)

    tools.on(poison)
    tools.fill([make_group(2)])
    assert "wrong magic" in tools.json("peek")[0]["problem"]
    assert "wrong magic" in tools("peek", "--prompt-id", "1", code=1)
    shown = tools("export", str(recording))
    assert "exported 1 groups" in shown and "skipped prompt 1: corrupt" in shown


# ── dead letters ──

QUESTION = encode_prompt(Prompt(messages=(("user", "2 + 2 = ?"),), ground_truth=4, priority=5))


def test_dead_letters_are_listed_and_shown(tools: Tools) -> None:
    async def poison(queue: RedisReplayQueue) -> None:
        await queue.submit([QUESTION, QUESTION], [5, 5], "")
        good, bad = await queue.lease("rollout-0", 2)
        await queue.append(good, encode_group(make_group(good.prompt_id)), 0)
        await queue.append(bad, b"garbage", 0)
        await queue.take_term(0)
        for prompt_id in await queue.take(1, 2):
            await queue.dead_letter(prompt_id, f"non_finite: made up for prompt {prompt_id}")

    tools.on(poison)
    tools.dead_letter([QUESTION], "engine_error")
    letters = tools.json("dlq")
    assert [letter["prompt_id"] for letter in letters] == [3, 2, 1], "newest first"
    assert [letter["reason"] for letter in tools.json("dlq", "list", "--reason", "engine_error")] == ["engine_error"]
    assert len(tools.json("dlq", "list", "--limit", "2")) == 2
    assert "non_finite: made up" in tools("dlq")
    good = tools.json("dlq", "show", letters[2]["id"])
    assert good["prompt"]["messages"] == [["user", "2 + 2 = ?"]]
    assert len(good["group"]["trajectories"]) == 4
    bad = tools.json("dlq", "show", letters[1]["id"])
    assert bad["group"] is None and "wrong magic" in bad["group_problem"]
    assert "2 + 2 = ?" in tools("dlq", "show", letters[0]["id"])
    assert "there is no dead letter 1-1" in tools("dlq", "show", "1-1", code=1)
    assert "is not the id of a dead letter" in tools("dlq", "show", "yesterday", code=2)


def test_requeued_prompts_are_new_submissions(tools: Tools) -> None:
    tools.dead_letter([QUESTION] * 250, "engine_error")
    tools.dead_letter([QUESTION], "reward_error")
    first = tools.json("dlq", "list", "--limit", "1000")[-1]["id"]
    assert tools.json("requeue", first)["requeued"] == [{"id": first, "prompt_id": 252}]
    assert "there is no dead letter" in tools("requeue", first, code=1)
    assert "requeued 249" in tools("requeue", "--reason", "engine_error")
    assert "requeued 1 " in tools("requeue", "--all")
    assert tools.json("dlq") == []
    stat = tools.stat()
    assert (stat.admitted, stat.dead_lettered, stat.pending_prompts) == (251, 251, 251)
    [lease] = tools.on(lambda queue: queue.lease("rollout-0", 1))
    assert (lease.prompt_id, lease.attempt, lease.payload) == (252, 1, QUESTION)
    assert tools.stat().admitted == 252


def test_a_dead_letter_without_its_prompt_stays(tools: Tools) -> None:
    tools.dead_letter([b"", QUESTION], "engine_error")
    error = tools("requeue", "--all", code=1)
    assert "1 dead letters could not be requeued" in error and "purge it" in error
    assert len(tools.json("dlq")) == 1
    assert tools.stat().pending_prompts == 1


def test_purging_needs_a_yes(tools: Tools) -> None:
    tools.dead_letter([QUESTION] * 3, "engine_error")
    first = tools.json("dlq")[0]["id"]
    assert "is needed to delete 3 dead letters" in tools("dlq", "purge", "--all", code=2)
    assert len(tools.json("dlq")) == 3
    assert "purged 1 " in tools("dlq", "purge", first, "--yes")
    assert "purged 2 " in tools("dlq", "purge", "--all", "--yes")
    assert tools.json("dlq") == []
    assert tools.stat().dead_lettered == 3


# ── the command itself ──


def test_wrong_usage_is_one_line(tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "run 'nobody' has no queue on this Redis" in tools("stat", run="nobody", code=1)
    tools.dead_letter([QUESTION], "engine_error")
    assert "only one of these" in tools("requeue", code=2)
    assert "only one of these" in tools("dlq", "purge", "1-1", "--all", code=2)
    assert "--limit: must be between" in tools("peek", "--limit", "0", code=2)
    monkeypatch.chdir(tmp_path)
    for words, problem in (
        ([], "there is no run in runs/"),
        (["--redis-url", tools.url], "--redis-url needs --run NAME"),
        (["--redis-url", "http://here", "--run", "x"], "--redis-url: "),
        (["--redis-url", "redis://127.0.0.1:1", "--run", "x"], "Redis does not answer"),
        (["--config", "nowhere.yaml"], "nowhere.yaml does not exist"),
    ):
        assert cli.main(["queue", "stat", *words]) in (1, 2)
        error = tools.capsys.readouterr().err
        assert problem in error and error.count("\n") == 1, error


def test_the_newest_run_of_this_folder_is_the_default(
    tools: Tools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.fill([make_group(0)])
    config = make_config(tmp_path / "runs", tmp_path, tools.url, tools.run)
    config.folder.mkdir(parents=True)
    (config.folder / "config.yaml").write_text(dump_config(config))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["queue", "stat", "--json"]) == 0
    report = json.loads(tools.capsys.readouterr().out)
    assert report["run"] == tools.run and report["admission_limit"] == 101 * 2


@pytest.mark.parametrize("words", [["--help"], ["dlq", "--help"], ["import", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    script = f"""
import sys
from penstock.cli.main import main
try:
    code = main(["queue", *{words!r}])
except SystemExit as exit:
    code = exit.code
heavy = sorted({{"numpy", "pyarrow", "redis", "pydantic", "rich"}} & set(sys.modules))
assert not code and not heavy, (code, heavy)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
