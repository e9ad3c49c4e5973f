"""The figures of bench/gpu/whole_run.py: which steps count, and what a run that generates ahead may claim."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_modules import imported_bench


@pytest.fixture
def bench_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The modules of the benchmark, with results in a temporary folder. None of them stays imported."""
    monkeypatch.setenv("PENSTOCK_BENCH_WRITE", f"part={tmp_path / 'part.json'}")
    with imported_bench():
        yield


def log_of(seconds: list[float], **settings: Any) -> Any:
    from measuring.gpu_use import GpuSamples
    from whole_run_parts.steps import StepLog
    from whole_run_parts.task import Task

    steps = StepLog(Task("tiny", num_steps=len(seconds)), GpuSamples(), started_at=100.0, **settings)
    at = 100.0
    for step_s in seconds:
        at += step_s
        steps.add(at, 1000, {"wait": step_s / 2})
    return steps


def rates(results: Any) -> dict[str, list[float]]:
    return {m.name: m.rates for m in results.measurements}


def test_steps_of_the_warm_up_do_not_count(bench_modules: None, tmp_path: Path) -> None:
    figures = rates(log_of([50, 9, 9, 2, 2, 4]).finish())
    assert figures["step"] == [2, 2, 4]
    assert figures["response tokens of a step"] == [500, 500, 250]
    assert figures["response tokens over all steps"] == [3000 / 8]
    assert figures["step: wait"] == [1, 1, 2]
    assert figures["first step after"] == [50]
    assert json.loads((tmp_path / "part.json").read_text())["measurements"], "every step saves the figures so far"


def test_tokens_generated_before_the_measured_steps_do_not_count(bench_modules: None) -> None:
    steps = log_of([50, 9, 9, 2, 2])
    steps.generated_rate = 400.0
    assert rates(steps.results())["response tokens over all steps"] == [400]
    steps.generated_rate = 700.0
    assert rates(steps.results())["response tokens over all steps"] == [500]


def test_a_run_that_was_cut_off_misses_its_bar(bench_modules: None) -> None:
    steps = log_of([50, 9, 9, 2, 2])
    steps.task = type(steps.task)("tiny", num_steps=15)
    (bar,) = steps.finish().bars
    assert not bar.ok


def test_parts_are_compared_with_those_of_their_own_round(bench_modules: None) -> None:
    import whole_run
    from harness import Measurement

    figures = {
        "ours-0.5b": 30.0, "ours-0.5b@2": 24.0, "ours-0.5b@3": 99.0, "ours-sync-0.5b": 1.0, "trl-0.5b": 10.0,
        "trl-0.5b@2": 10.0, "trl-rows32-0.5b@2": 12.0, "trl-1.5b@2": 1.0,
    }  # fmt: skip
    measured = [Measurement(f"{part}: {whole_run.RATE}", "", [rate]) for part, rate in figures.items()]
    assert whole_run.ratios_of_rounds(measured, "trl", "0.5b") == [3.0, 2.0]
    assert whole_run.ratios_of_rounds(measured, "verl", "0.5b") == []


def test_a_mistyped_variant_is_refused(bench_modules: None, tmp_path: Path) -> None:
    import whole_run
    from whole_run_parts.task import Task

    for run in (whole_run._ours, whole_run._trl):
        with pytest.raises(SystemExit, match="unknown variants piar"):
            run(Task("tiny"), tmp_path, tmp_path, "torch", 0.0, 0.0, ["piar"])


def test_we_are_compared_with_the_best_of_each_peer(
    bench_modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import harness
    import measuring.parts
    import whole_run

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(measuring.parts, "RESULTS", tmp_path)
    name = "response tokens over all steps"
    figures = {
        "ours-0.5b": 1500.0, "trl-0.5b": 900.0, "trl-rows32-0.5b": 1000.0, "verl-liger-0.5b": 750.0, "verl-0.5b": 500.0,
        "ours-1.5b": 1.0, "trl-7b": 1.0,
    }  # fmt: skip
    measured = [harness.Measurement(f"{part}: {name}", "tokens/s", [rate]) for part, rate in figures.items()]
    harness.report(whole_run.NAME, whole_run.TITLE, measured, [])
    for _ in range(2):  # a second comparison replaces the first
        assert whole_run.compare()
        saved = json.loads((tmp_path / "whole_run.json").read_text())
        assert [(bar["name"], bar["value"]) for bar in saved["bars"]] == [
            ("ours / TRL: 0.5b, response tokens a second", 1.5),
            ("ours / verl: 0.5b, response tokens a second", 2.0),
        ]


def test_a_prompt_has_a_token_for_each_letter(bench_modules: None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from whole_run_parts.reward import compute_score
    from whole_run_parts.task import Task, write_model

    write_model(tmp_path, "tiny")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    task = Task("tiny", prompt_tokens=40)
    for prompt in task.prompts()[:3]:
        assert len(tokenizer(prompt)["input_ids"]) == 40
    assert len(tokenizer) == 512
    texts = tokenizer.batch_decode([[300, 301], [400, 401]])
    assert len({compute_score("", text, "") for text in ("aa", "ab", "bb")}) == 3
    assert all(texts)


def test_waiting_is_no_overhead_and_is_reported_too(bench_modules: None) -> None:
    from whole_run_parts.steps import OUTSIDE, OVERHEAD, SERVER_IDLE, LearnerTimes

    steps = log_of([50, 9, 9, 10, 10], server_idle_share=0.25)
    warm, measured = LearnerTimes(0, 9, 0, 0), LearnerTimes(between_s=1, step_s=9, wait_s=5, compute_s=4)
    steps.learner_times = [warm, warm, warm, measured, measured]
    figures = rates(steps.results())
    assert figures[OVERHEAD] == [pytest.approx(0.2)], "1 of 5 s in which there was something to do"
    assert figures["share of the learner's time in which it waited for groups"] == [pytest.approx(0.5)]
    assert figures[OUTSIDE] == [pytest.approx(0.6)]
    assert figures[SERVER_IDLE] == [0.25]


def test_the_shares_are_judged_at_the_model_that_the_goal_names(bench_modules: None) -> None:
    from dataclasses import replace

    from whole_run_parts.steps import OUTSIDE, OVERHEAD, SERVER_IDLE, LearnerTimes

    steps = log_of([50, 9, 9, 10, 10], server_idle_share=0.04)
    steps.learner_times = [LearnerTimes(between_s=0, step_s=10, wait_s=1, compute_s=8.8)] * 5
    trained = {"steps that were trained": True}
    assert {bar.name for bar in steps.finish().bars} == {"steps that were trained"}
    steps.task = replace(steps.task, model="1.5b")
    judged = {bar.name: bar.ok for bar in steps.finish().bars}
    assert judged == {SERVER_IDLE: True, OVERHEAD: True, OUTSIDE: False} | trained
    steps.task = replace(steps.task, model="0.5b")
    assert {bar.name: bar.ok for bar in steps.finish().bars} == {SERVER_IDLE: True} | trained
    steps.is_judged = False
    assert {bar.name for bar in steps.finish().bars} == {"steps that were trained"}


def test_a_start_is_broken_down_into_phases_and_saved_while_it_runs(
    bench_modules: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cold_start import FIRST_STEP, Timeline
    from penstock.api.records import Part, Phase

    def part(component: str, *phases: tuple[str, int]) -> Part:
        return Part(component=component, phases=tuple(Phase(name=name, entered_at_ms=at) for name, at in phases))

    timeline = Timeline(started_at=100.0)
    timeline.follow([part("learner", ("importing", 103_000), ("loading", 107_000))])
    saved = {m["name"]: m["rates"] for m in json.loads((tmp_path / "part.json").read_text())["measurements"]}
    assert saved == {"learner: before its first phase": [3], "learner: importing": [4]}, "loading has not ended"
    timeline.follow([part("learner", ("importing", 103_000), ("loading", 107_000), ("training", 112_000))])
    timeline.ended_s = 20.0
    figures = rates(timeline.results())
    assert figures["learner: loading"] == [5] and figures["learner: training"] == [8] and figures[FIRST_STEP] == [20]
    timeline.print_shares()
    said = [" ".join(line.split("]")[1].split()) for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert said == [
        "15.0% 3.0 s learner: before its first phase",
        "20.0% 4.0 s learner: importing",
        "25.0% 5.0 s learner: loading",
        "40.0% 8.0 s learner: training",
    ]


def test_parts_are_compared_with_a_bar_for_each_pair(
    bench_modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cold_start
    from harness import Bar, Measurement
    from measuring.results import Results

    seconds = {"before": 100.0, "cold": 70.0, "warm": 40.0}
    measured = [Measurement(f"{part}: {cold_start.FIRST_STEP}", "s", [value]) for part, value in seconds.items()]
    monkeypatch.setattr(cold_start, "earlier_results", lambda *_: Results(measured))
    reported: list[Bar] = []
    monkeypatch.setattr(cold_start, "report", lambda _name, _title, _measured, bars: reported.extend(bars))
    cold_start.compare()
    assert {bar.name.partition(":")[0]: (bar.value, bar.ok) for bar in reported} == {
        "warm / before": (0.4, True), "warm / cold": (40 / 70, False), "cold / before": (0.7, True),
    }  # fmt: skip


def test_the_engines_own_times_are_read(bench_modules: None, tmp_path: Path) -> None:
    from cold_start import Timeline, _read_engine_log

    log = tmp_path / "rollout-0.log"
    log.write_text(
        "00:00:01 INFO start: EngineCore's process imported vLLM in 12.3 s; waited for 0.4 s of it\n"
        "(EngineCore pid=7) INFO 11-17 06:00:20 [core.py:98] Initializing a V1 LLM engine (v0.26.0) with config\n"
        "INFO 11-17 06:00:31 [default_loader.py:267] Loading weights took 1.52 seconds\n"
        "INFO 11-17 06:00:35 [backends.py:559] Dynamo bytecode transform time: 3.1 s\n"
        "INFO 11-17 06:00:58 [monitor.py:34] torch.compile takes 21.40 s in total\n"
        "INFO 11-17 06:01:09 [gpu_model_runner.py:2] Graph capturing finished in 9 secs, took 0.48 GiB\n"
        "INFO 11-17 06:01:10 [core.py:210] init engine (profile, create kv cache, warmup model) took 35.02 seconds\n"
    )
    timeline = Timeline(started_at=time.mktime((2026, 11, 17, 6, 0, 0, 0, 0, -1)))
    _read_engine_log(timeline, log)
    assert timeline.events == {
        "EngineCore begins": 20,
        "torch.compile has traced the model": 35,
        "torch.compile has ended": 58,
        "CUDA graphs are captured": 69,
        "EngineCore is ready": 70,
    }
    assert timeline.of_engine == {
        "EngineCore's process imports": 12.3,
        "the server waits for that": 0.4,
        "Loading weights": 1.52,
        "Dynamo bytecode transform time": 3.1,
        "torch.compile": 21.4,
        "Graph capturing": 9.0,
        "init engine (profile, create kv cache, warmup model)": 35.02,
    }


def test_overlap_is_a_ratio_of_rates_and_its_ideal_the_longer_half_of_a_synchronous_step(bench_modules: None) -> None:
    from harness import Measurement
    from whole_run import overlap
    from whole_run_parts.steps import RATE

    values = {
        f"ours-0.5b: {RATE}": 50.0,
        f"ours-sync-0.5b: {RATE}": 30.0,
        "ours-sync-0.5b: step": 5.0,
        "ours-sync-0.5b: step: wait": 2.5,
        f"ours-0.5b@2: {RATE}": 90.0,
        f"ours-0.5b@3: {RATE}": 40.0,
        f"ours-sync-0.5b@3: {RATE}": 40.0,
        "ours-sync-0.5b@3: step": 4.0,
        "ours-sync-0.5b@3: step: wait": 3.0,
        f"ours-1.5b: {RATE}": 1,
    }
    figures = {each.name: each.rates for each in overlap([Measurement(name, "", [v]) for name, v in values.items()])}
    assert figures["overlap: 0.5b, response tokens / those of synchronous training"] == pytest.approx([5 / 3, 1])
    assert figures["overlap: 0.5b, ideal"] == pytest.approx([2, 4 / 3])
    assert figures["overlap: 0.5b, of its ideal"] == pytest.approx([5 / 6, 3 / 4]), "rounds are compared, not mixed"
    assert not any("1.5b" in name for name in figures), "a model that ran one way has no figure"


def test_verl_gets_the_same_task(bench_modules: None, tmp_path: Path) -> None:
    import pyarrow.parquet

    from whole_run_parts.task import Task
    from whole_run_parts.verl_runs import VARIANTS, arguments_of, settings_of, write_parquet

    task = Task("0.5b", num_prompts=4, num_samples=2, prompt_tokens=16, response_tokens=8, num_steps=3)
    write_parquet(tmp_path / "prompts.parquet", task)
    rows = pyarrow.parquet.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert [row["prompt"][0]["content"] for row in rows] == task.prompts()
    assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
    settings = settings_of(task, tmp_path / "model", tmp_path / "prompts.parquet", 1024, [])
    arguments = arguments_of(settings)
    assert f"data.train_files={tmp_path}/prompts.parquet" in arguments
    wanted = {
        "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.ignore_eos=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024", "trainer.total_training_steps=3",
    }  # fmt: skip
    assert wanted <= set(arguments)
    for variant in VARIANTS:
        changed = settings_of(task, tmp_path / "model", tmp_path / "prompts.parquet", 1024, [variant])
        assert changed.keys() == settings.keys() and changed != settings, "a variant changes values of verl's settings"


def test_verls_steps_are_read_from_its_file(bench_modules: None, tmp_path: Path) -> None:
    from whole_run_parts.task import Task
    from whole_run_parts.verl_runs import phases_of, step_rows, tokens_of

    path = tmp_path / "metrics.jsonl"
    assert step_rows(path) == []
    step = {"timing_s/step": 9.0, "timing_s/gen": 4.0, "timing_s/update_actor": 3.0, "response_length/mean": 256.0}
    lines = [{"step": 0, "data": {"val/reward": 1.0}}, {"step": 1, "data": step}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2, "da')
    (row,) = step_rows(path)
    assert tokens_of(row, Task("0.5b")) == 256 * 32 * 8
    assert phases_of(row) == {"generate": 4.0, "log-probs": 0.0, "update": 3.0, "push": 0.0, "rest": 2.0}


def test_the_first_errors_of_verls_log_are_printed_with_its_end(
    bench_modules: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from whole_run_parts.verl_runs import print_end

    lines = ["EngineCore: ValueError: no memory", *(f"line {i}" for i in range(100))]
    (tmp_path / "verl.log").write_text("\n".join(lines))
    print_end(tmp_path / "verl.log")
    printed = capsys.readouterr().err.splitlines()
    assert lines[0] in printed and "line 99" in printed and "line 40" in printed and "line 39" not in printed


@pytest.mark.usefixtures("bench_modules")
@pytest.mark.parametrize("peer", ["ours", "verl_runs"])
def test_a_run_is_stopped_before_its_part_is_killed(peer: str) -> None:
    """Otherwise the part's numbers are lost with it."""
    import importlib

    import whole_run

    assert importlib.import_module(f"whole_run_parts.{peer}").STOP_S < whole_run.END_S
