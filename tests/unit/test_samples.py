"""Trained samples as text: the files, what is chosen from them, and `penstock samples`."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import samples
from penstock.cli.main import main
from penstock.errors import InvalidInput
from penstock.samples import (
    NEWEST,
    OLDER,
    Place,
    Range,
    SampleFile,
    SampleFilter,
    groups_newest_first,
    is_sampled,
    line_of,
    page,
    samples_of,
    select,
)
from support.groups import SAMPLE, group_of_samples, write_samples


def read(folder: Path) -> list[tuple[int, int]]:
    """Step and prompt of every group, newest first."""
    return [(line["step"], line["prompt_id"]) for _, line in groups_newest_first(folder)]


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    group = group_of_samples(3, 9, 0.0, 1.0, prompt="ä\n\x1b[31m", ground_truth={"tests": [1, 2]}, response='"\u2028')
    write_samples(tmp_path, group)
    [(_, line)] = groups_newest_first(tmp_path)
    assert list(samples_of(line)) == group


def test_a_line_of_an_older_version_is_read(tmp_path: Path) -> None:
    line = line_of(group_of_samples(1, 1))
    del line["samples"][0]["reward_failed"]
    SampleFile(tmp_path, 0).write([line | {"added_later": 1}])
    assert select(tmp_path, SampleFilter(), 1) == group_of_samples(1, 1)


def test_half_of_a_surrogate_pair_does_not_stop_the_writer(tmp_path: Path) -> None:
    write_samples(tmp_path, group_of_samples(1, 1, response="\ud83d"), group_of_samples(2, 2))
    assert read(tmp_path) == [(2, 2), (1, 1)]


def test_a_repeated_step_after_a_restart_is_shown_once(tmp_path: Path) -> None:
    write_samples(
        tmp_path, group_of_samples(1, 1), group_of_samples(2, 2), group_of_samples(2, 3), group_of_samples(3, 4)
    )
    write_samples(tmp_path, group_of_samples(2, 3, 0.5), group_of_samples(2, 5), start_step=1)
    assert read(tmp_path) == [(2, 5), (2, 3), (1, 1)], "steps 2 and 3 of the first learner were given up"
    assert [sample.reward for sample in select(tmp_path, SampleFilter(prompt_id=3), 10)] == [0.5]


def test_a_line_that_a_crash_cut_off_is_skipped_and_spoils_no_other(tmp_path: Path) -> None:
    write_samples(tmp_path, group_of_samples(1, 1), group_of_samples(2, 2))
    path = tmp_path / NEWEST
    path.write_bytes(path.read_bytes()[:-20])
    assert read(tmp_path) == [(1, 1)]
    write_samples(tmp_path, group_of_samples(2, 2), start_step=1)
    assert read(tmp_path) == [(2, 2), (1, 1)]


def test_the_files_stay_below_their_limit_and_keep_the_newest(tmp_path: Path) -> None:
    max_bytes = 20_000
    write_samples(tmp_path, *(group_of_samples(step, step) for step in range(1, 201)), max_bytes=max_bytes)
    line = len(json.dumps(line_of(group_of_samples(1, 1))))
    assert (tmp_path / OLDER).stat().st_size + (tmp_path / NEWEST).stat().st_size <= max_bytes + line
    kept = [step for step, _ in read(tmp_path)]
    assert kept == list(range(200, 200 - len(kept), -1))
    assert len(kept) * line > max_bytes / 2 - line


def test_lines_longer_than_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_samples(tmp_path, *(group_of_samples(step, step, response="x" * step * 37) for step in range(1, 30)))
    for size in (1, 64, 1000):
        monkeypatch.setattr(samples, "READ_BYTES", size)
        assert read(tmp_path) == [(step, step) for step in range(29, 0, -1)]


def test_pages_go_on_where_they_were_while_the_learner_writes_and_renames(tmp_path: Path) -> None:
    write_samples(tmp_path, *(group_of_samples(step, step) for step in range(1, 7)))
    write_samples(tmp_path, group_of_samples(5, 50), start_step=4)
    first = page(tmp_path, SampleFilter(), 2, None, 100)
    assert [sample.prompt_id for sample in first.samples] == [50, 4]
    (tmp_path / NEWEST).rename(tmp_path / OLDER)
    write_samples(tmp_path, group_of_samples(6, 60), start_step=5)
    second = page(tmp_path, SampleFilter(), 2, Place.parse(str(first.next_place)), 100)
    assert [sample.prompt_id for sample in second.samples] == [3, 2]
    last = page(tmp_path, SampleFilter(), 2, second.next_place, 100)
    assert [sample.prompt_id for sample in last.samples] == [1] and last.next_place is None
    assert page(tmp_path, SampleFilter(), 2, Place(1, 2, None), 100).samples == [], "that file is gone"


def test_a_page_looks_at_a_bounded_number_of_groups(tmp_path: Path) -> None:
    write_samples(tmp_path, *(group_of_samples(step, step) for step in range(1, 11)))
    found = page(tmp_path, SampleFilter(prompt_id=1), 5, None, 4)
    assert found.samples == [] and found.next_place is not None
    found = page(tmp_path, SampleFilter(prompt_id=1), 5, found.next_place, 100)
    assert [sample.prompt_id for sample in found.samples] == [1]


@pytest.mark.parametrize(
    ("wanted", "prompts"),
    [
        (SampleFilter(steps=Range.parse("2:3")), [3, 2]),
        (SampleFilter(steps=Range.parse("2")), [2]),
        (SampleFilter(rewards=Range.parse(":0")), [2]),
        (SampleFilter(lengths=Range.parse("100:")), [3]),
        (SampleFilter(versions=Range.parse("8")), [3]),
        (SampleFilter(data_source="code"), [4]),
        (SampleFilter(text="sum is"), [4, 3, 1]),
        (SampleFilter(pattern=r"^no.*\d"), [2]),
        (SampleFilter(prompt_id=1), [1]),
    ],
)
def test_samples_are_filtered(tmp_path: Path, wanted: SampleFilter, prompts: list[int]) -> None:
    write_samples(
        tmp_path,
        group_of_samples(1, 1),
        group_of_samples(2, 2, -1.0, response="no idea, 4?"),
        group_of_samples(3, 3, num_tokens=100, min_version=7, max_version=9),
        group_of_samples(4, 4, data_source="code"),
    )
    assert [sample.prompt_id for sample in select(tmp_path, wanted, 10)] == prompts


def test_steps_of_validations_come_in_any_order(tmp_path: Path) -> None:
    write_samples(tmp_path, *(group_of_samples(step, step, validation="math") for step in (10, 20, 5)))
    assert [sample.step for sample in select(tmp_path, SampleFilter(steps=Range(low=10)), 9)] == [20, 10]


def test_the_worst_and_the_best_come_from_all_samples(tmp_path: Path) -> None:
    write_samples(
        tmp_path, group_of_samples(1, 1, 0.5, -2.0), group_of_samples(2, 2, 3.0, 0.0), group_of_samples(3, 3, 0.5)
    )
    write_none = replace(SAMPLE, step=4, prompt_id=4, reward=None)
    SampleFile(tmp_path, 0).write([line_of([write_none])])
    assert [sample.reward for sample in select(tmp_path, SampleFilter(), 2, "worst")] == [-2.0, 0.0]
    assert [sample.reward for sample in select(tmp_path, SampleFilter(), 2, "best")] == [3.0, 0.5]
    assert [sample.prompt_id for sample in select(tmp_path, SampleFilter(), 2, "best")] == [2, 3], (
        "the newest of equals"
    )
    assert select(tmp_path, SampleFilter(), 2, "best", max_groups=2)[0].prompt_id == 3


def test_the_share_is_kept_and_always_has_the_same_groups() -> None:
    chosen = [prompt_id for prompt_id in range(1, 10_001) if is_sampled(prompt_id, 0.25)]
    assert 2300 < len(chosen) < 2700
    assert chosen == [prompt_id for prompt_id in range(1, 10_001) if is_sampled(prompt_id, 0.25)]
    assert all(is_sampled(prompt_id, 1.0) for prompt_id in range(1000))
    assert not any(is_sampled(prompt_id, 0.0) for prompt_id in range(1000))


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInput, match="is not a regular expression"):
        SampleFilter(pattern="(")


def test_the_command_fits_80_columns_and_shows_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(
        tmp_path / "runs" / "a",
        group_of_samples(1, 1, 0.25, response="\x1b[2J" + "long " * 300, server_id="rollout-with-a-long-name-0"),
        group_of_samples(2, 2, 1.0),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["samples"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b[2J" not in shown and r"\x1b[2J" in shown
    assert shown.startswith("samples of runs/a\n")
    words = shown.split()[3:]
    assert words[: words.index("prompt")] == ["reward", "1", "format", "0.5", "step", "2"]
    assert "truth" in shown and "The sum is 5." in shown and "characters …" in shown
    assert shown.index("The sum is 5.") < shown.index("long long"), "the newest comes first"
    assert main(["samples", "--worst", "--limit", "1", "--full"]) == 0
    assert capsys.readouterr().out.count("long") == 301


def test_the_command_as_json_and_its_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["samples"]) == 2
    assert "no run in runs/ has samples; give --run-dir" in capsys.readouterr().err
    write_samples(tmp_path / "r", group_of_samples(1, 1, 0.0, 1.0))
    assert main(["samples", "--run-dir", "r", "--json", "--best"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["sample"], row["reward"], row["ground_truth"]) for row in rows] == [(1, 1.0, "5"), (0, 0.0, "5")]
    assert main(["samples", "--run-dir", "r", "--reward=-1:0"]) == 0
    assert "reward 0" in capsys.readouterr().out
    assert main(["samples", "--run-dir", "r", "--step", "7:"]) == 0
    assert capsys.readouterr().out == "no sample of r matches\n"
    assert main(["samples", "--run-dir", "r", "--step", "x"]) == 2
    assert "--step: 'x' is not a range; write 3:7" in capsys.readouterr().err
    assert main(["samples", "--run-dir", str(tmp_path)]) == 2
    assert "has no samples.jsonl" in capsys.readouterr().err


def test_the_command_shows_samples_of_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "runs" / "b", group_of_samples(9, 9, 1.0))
    assert main(["samples", "--validation"]) == 2
    assert "no run in runs/ has samples" in capsys.readouterr().err
    folder = tmp_path / "runs" / "a" / "validation"
    write_samples(folder, *(group_of_samples(step, step, validation="math") for step in (0, 10)))
    assert main(["samples", "--validation", "--step", "0"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith("samples of runs/a/validation reward 1 format 0.5 validation of math step 0 prompt 0.0")
    assert main(["samples", "--validation", "--run-dir", "runs/b"]) == 2
    assert "runs/b/validation has no samples.jsonl" in capsys.readouterr().err


def test_the_run_that_is_up_is_shown_and_not_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first step may take a while. Samples of an older run would be taken for its own."""
    monkeypatch.chdir(tmp_path)
    write_samples(tmp_path / "runs" / "old", group_of_samples(1, 1, 0.0))
    for name in ("old", "new"):
        (tmp_path / "runs" / name).mkdir(exist_ok=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        address = {"run": "new", "host": "127.0.0.1", "rest_port": gateway.getsockname()[1]}
        (tmp_path / "runs" / "new" / "gateway.json").write_text(json.dumps(address))
        assert main(["samples"]) == 2
        assert "runs/new has no samples.jsonl" in capsys.readouterr().err
    assert main(["samples"]) == 0
    assert capsys.readouterr().out.startswith("samples of runs/old\n")
