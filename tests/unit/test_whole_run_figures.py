"""The figures of bench/gpu/whole_run.py: which steps count, and what a run that generates ahead may claim."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The modules of the benchmark, with results in a temporary folder. None of them stays imported."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.syspath_prepend(str(BENCH / "gpu"))
    monkeypatch.setenv("PENSTOCK_BENCH_WRITE", f"part={tmp_path / 'part.json'}")
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(BENCH) in str(sys.modules[name].__file__):
            del sys.modules[name]


def log_of(seconds: list[float], **settings: Any) -> Any:
    from gpu_use import GpuSamples
    from whole_run_steps import StepLog
    from whole_run_task import Task

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


def test_we_are_compared_with_the_best_of_trl(
    bench_modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import parts
    import whole_run

    import harness

    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(parts, "RESULTS", tmp_path)
    name = "response tokens over all steps"
    figures = {"ours-0.5b": 1500.0, "trl-0.5b": 900.0, "trl-rows32-0.5b": 1000.0, "ours-1.5b": 1.0, "trl-7b": 1.0}
    measured = [harness.Measurement(f"{part}: {name}", "tokens/s", [rate]) for part, rate in figures.items()]
    harness.report(whole_run.NAME, whole_run.TITLE, measured, [])
    for _ in range(2):  # a second comparison replaces the first
        assert whole_run.compare()
        saved = json.loads((tmp_path / "whole_run.json").read_text())
        assert [(bar["name"], bar["value"]) for bar in saved["bars"]] == [
            ("ours / TRL: 0.5b, response tokens a second", 1.5)
        ]


def test_a_prompt_has_a_token_for_each_letter(bench_modules: None, tmp_path: Path) -> None:
    from transformers import AutoTokenizer
    from whole_run_reward import compute_score
    from whole_run_task import Task, write_model

    write_model(tmp_path, "tiny")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    task = Task("tiny", prompt_tokens=40)
    for prompt in task.prompts()[:3]:
        assert len(tokenizer(prompt)["input_ids"]) == 40
    assert len(tokenizer) == 512
    texts = tokenizer.batch_decode([[300, 301], [400, 401]])
    assert len({compute_score("", text, "") for text in ("aa", "ab", "bb")}) == 3
    assert all(texts)
