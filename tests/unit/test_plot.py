"""The history of a run in its folder: `penstock plot` and `penstock runs metrics`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.step_history import METRICS, read_steps
from penstock_tools.plot import MAX_RUNS, RunHistory, _style, smoothed


def write_run(folder: Path, *steps: Mapping[str, Any], scores: Mapping[int, float] | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    if scores is not None:
        lines = (json.dumps({"step": step, "score": score}) + "\n" for step, score in scores.items())
        (folder / "validation.jsonl").write_text("".join(lines))
    return folder


def step(number: int, **more: float | None) -> dict[str, float | None]:
    return {"step": number, "reward_mean": number / 10, "step_s": 50.0, "between_s": 10.0, **more}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were written."""
    figures, write = list[Figure](), Figure.savefig

    def record(figure: Figure, *args: Any, **options: Any) -> None:
        figures.append(figure)
        write(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return figures


def test_steps_that_were_trained_again_count_once(tmp_path: Path) -> None:
    again = step(2, grad_norm=None) | {"reward_mean": 0.9}
    run = write_run(tmp_path / "run", step(1), step(2), step(3), again, step(3))
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"no_step": 1}\n{"step": 4, "rewa')
    steps = read_steps(run)
    assert [found["step"] for found in steps] == [1, 2, 3]
    assert steps[1]["reward_mean"] == 0.9 and math.isnan(steps[1]["grad_norm"])
    assert read_steps(tmp_path) == []
    (tmp_path / METRICS).mkdir()
    with pytest.raises(ConfigError, match="metrics.jsonl cannot be read: Is a directory"):
        read_steps(tmp_path)


def test_time_is_that_of_the_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", step(1), step(2, lr=None), step(3, lr=0.5), scores={2: 0.5, 0: 0.25, 9: 1.0})
    history = RunHistory.read(run, "run")
    assert history.points("reward_mean", True) == ([60, 120, 180], [0.1, 0.2, 0.3])
    assert history.points("lr", False) == ([3], [0.5]), "steps without the metric are skipped"
    assert history.score_points(False) == ([0, 2, 9], [0.25, 0.5, 1.0])
    assert history.score_points(True) == ([0, 120], [0.25, 0.5]), "no step 9 tells when it was"


def test_a_mean_begins_with_fewer_values() -> None:
    assert smoothed([4.0, 0.0, 2.0, 7.0], 3) == [4, 2, 2, 3]
    assert smoothed([], 3) == []


def test_no_two_runs_look_the_same() -> None:
    looks = {(to_hex(style["color"]), style["linestyle"]) for style in map(_style, range(MAX_RUNS))}
    assert len(looks) == MAX_RUNS


def test_runs_are_lines_of_one_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drawn: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/long"), step(1), step(2), step(3), step(2), step(3), scores={0: 0.25, 2: 0.5})
    write_run(Path("other"), step(1, lr=1e-6))
    words = ["plot", "long", "other", "--metrics", "reward_mean,lr,entropy,step", "--smooth", "1"]
    assert main(words) == 0
    assert capsys.readouterr().out == "skipped: no run has entropy\nplot.png\n"
    assert Path("plot.png").read_bytes().startswith(b"\x89PNG")
    [figure] = drawn
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["long", "other", "held-out score"]
    titles = [(axis.get_title(), axis.get_xlabel()) for axis in figure.axes]
    assert titles == [("reward", "step"), ("reward", "minutes"), ("learning rate", "step"), ("step", "step")]
    long, other = figure.axes[0].lines
    assert (list(long.get_xdata()), list(long.get_ydata())) == ([1, 2, 3], [0.1, 0.2, 0.3])
    assert list(other.get_xdata()) == [1]
    assert [line.get_marker() for line in (long, other)] == ["", "o"], "a line through one point cannot be seen"
    assert figure.axes[0].collections[0].get_offsets().tolist() == [[0, 0.25], [2, 0.5]]

    assert main(["plot", "other", "--by", "time", "--output", "one.svg"]) == 0
    assert capsys.readouterr().out == "one.svg\n", "not every run has all that is drawn by default"
    assert [axis.get_xlabel() for axis in drawn[1].axes] == ["minutes"] * 3, "reward, learning rate, seconds of a step"
    assert [line.get_alpha() for line in drawn[1].axes[0].lines] == [0.3, None], "single steps are behind their mean"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["rnu"], "there is no run 'rnu' in runs/, and no such folder; did you mean run?"),
        (["."], ". has no metrics.jsonl or validation.jsonl; give the folder of a run that has trained a step"),
        (["empty"], "no step is done yet"),
        (["run", "--metrics", "rewrd_mean"], "no run has rewrd_mean; did you mean reward_mean?"),
        (["run", "--output", "plot.doc"], "--output: plot.doc must end in ."),
        (["run", "--output", "none/plot.png"], "none/plot.png cannot be written"),
        (["run"] * 21, "21 runs are too many"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(
    words: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/run"), step(1))
    write_run(Path("runs/empty"))
    assert main(["plot", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1 and not Path("plot.png").exists()


def test_the_steps_of_a_run_that_has_ended_are_shown_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    of_learner = {"policy_version": 7, "time": 1000.5, "grad_norm": None}
    write_run(Path("runs/run"), *(step(number, **of_learner) for number in (1, 2, 3)))
    assert main(["runs", "metrics", "run", "--limit", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(found["step"], found["policy_version"], found["published_at_ms"]) for found in shown] == [
        (2, 7, 1000500),
        (3, 7, 1000500),
    ]
    assert shown[1]["metrics"]["reward_mean"] == 0.3 and shown[1]["metrics"]["grad_norm"] is None
    assert main(["runs", "metrics", str(tmp_path / "runs/run")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["1", "7", "0.1"]
    for words, complaint in (
        (["rnu"], "did you mean run?"), (["a", "b"], "metrics takes [RUN], not 'a b'"),
        (["run", "--run-dir", "runs/run"], "RUN cannot be combined with --run-dir"),
        (["run", "--run", "other"], "RUN cannot be combined with --run-dir, --url and --run"),
        ([".."], "error: .. has no metrics.jsonl"),
        ([], "no run is up in runs/"),
    ):  # fmt: skip
        assert main(["runs", "metrics", *words]) == 2
        error = capsys.readouterr().err
        assert complaint in error and error.count("\n") == 1
