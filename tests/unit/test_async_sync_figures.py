"""The figures of bench/async_sync.py: the time to a score, and runs of one seed that are compared with one another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench_modules import imported_bench


@pytest.fixture
def bench() -> Iterator[ModuleType]:
    """The benchmark, which does not stay imported."""
    with imported_bench("async_sync") as [module]:
        yield module


def row(bound: int, seed: int, step_s: float, scores: list[tuple[int, float]], is_corrected: bool = True) -> Any:
    variant = {
        "max_staleness": bound, "is_corrected": is_corrected, "seed": seed, "num_steps": 10, "engine": "torch",
        "lr": 1e-4, "snapshot_every": 5,
    }  # fmt: skip
    ended = [step_s * number for number in range(1, 11)]
    return {
        "variant": variant, "scores": scores, "ended_s": ended, "step_s": [step_s] * 10,
        "cpu_s": {"learner": 1.0, "rollout-0": 1.0},
    }  # fmt: skip


def bars(bench: ModuleType, rows: list[Any]) -> dict[str, Any]:
    return {bar.name: bar for bar in bench.judge(rows)[1]}


def test_the_time_to_a_score_is_interpolated(bench: ModuleType) -> None:
    ended = [2.0 * number for number in range(1, 11)]
    assert bench.seconds_to(0.9, [(0, 0.4), (5, 0.8), (10, 1.0)], ended) == pytest.approx(15)
    assert bench.seconds_to(0.9, [(0, 0.5), (5, 1.0)], ended) == pytest.approx(8)
    assert bench.seconds_to(0.9, [(0, 0.4), (5, 0.8), (10, 0.89)], ended) is None


def test_the_corrected_run_with_the_default_is_compared_with_the_synchronous_one_of_its_seed(bench: ModuleType) -> None:
    scores = [(0, 0.4), (5, 0.8), (10, 1.0)]
    rows = [row(0, seed, 2.0 * seed, scores) for seed in (1, 2)] + [row(2, seed, 1.0 * seed, scores) for seed in (1, 2)]
    rows += [row(4, seed, 0.1, scores) for seed in (1, 2)]
    rows += [row(8, seed, 0.1, scores) for seed in (1, 2)] + [row(2, 1, 0.1, scores, is_corrected=False)]
    judged = bars(bench, rows)
    assert judged["synchronous / staleness 2, corrected: time to 0.9"].value == pytest.approx(2.0)
    assert all(bar.ok for bar in judged.values())


def test_a_score_away_from_the_synchronous_one_misses_its_bar(bench: ModuleType) -> None:
    good, late, bad = ([(0, 0.4), (5, between), (10, end)] for between, end in ((0.8, 0.97), (0.7, 0.97), (0.8, 0.94)))
    judged = bars(bench, [row(bound, 1, 1, scores) for bound, scores in enumerate((good, good, late, good, bad))])
    judged |= bars(bench, [row(0, 1, 1, good), row(8, 1, 1, bad)])
    last, any_step = (f"corrected: score after {when} step, away from synchronous" for when in ("the last", "any"))
    assert judged[f"staleness 1, {last}"].ok and judged[f"staleness 1, {any_step}"].ok
    assert judged[f"staleness 2, {last}"].ok and judged[f"staleness 2, {any_step}"].value == pytest.approx(0.1)
    assert not judged[f"staleness 4, {last}"].ok and not judged[f"staleness 4, {any_step}"].ok
    assert f"staleness 8, {last}" not in judged


def test_scores_are_compared_by_their_means_over_seeds(bench: ModuleType) -> None:
    rows = [row(0, seed, 1, [(0, 0.4), (10, 0.95)]) for seed in (1, 2)]
    rows += [row(1, 1, 1, [(0, 0.4), (10, 0.91)]), row(1, 2, 1, [(0, 0.4), (10, 0.97)])]
    assert bars(bench, rows)["staleness 1, corrected: score after the last step, away from synchronous"].ok


def test_a_run_that_never_reaches_the_score_misses_a_bar(bench: ModuleType) -> None:
    judged = bars(bench, [row(0, 1, 1, [(0, 0.4), (10, 0.95)]), row(2, 1, 1, [(0, 0.4), (10, 0.8)])])
    assert not judged["staleness 2, corrected: runs that reach 0.9"].ok


def test_variants_are_valid_configurations_that_differ_as_their_names_say(bench: ModuleType, tmp_path: Path) -> None:
    from async_sync_parts.run import config_of

    arguments = argparse.Namespace(
        steps=5, engine="torch", lr=1e-4, score_every=1, correction="both", staleness=[0, 4], updates=2
    )  # fmt: skip
    variants = bench.variants_of(arguments, seed=3)
    assert [variant.name for variant in variants] == [
        "synchronous", "staleness 4, corrected", "staleness 4, not corrected",
    ]  # fmt: skip
    configs = [config_of(variant, tmp_path) for variant in variants]
    assert [config.replay.max_staleness for config in configs] == [0, 4, 4]
    assert [config.learner.algorithm.correction.mode for config in configs] == ["decoupled", "decoupled", "none"]
    assert all(config.replay.groups_per_step == 64 and config.learner.minibatches_per_step == 2 for config in configs)
    assert all(config.seed == 3 and config.learner.needed_roles.keys() == {"policy"} for config in configs)


def test_runs_with_other_settings_are_not_compared(bench: ModuleType) -> None:
    long, short = row(0, 1, 1, [(0, 0.4), (10, 0.95)]), row(0, 1, 1, [(0, 0.4), (10, 0.95)])
    short["variant"]["num_steps"] = 5
    other = row(4, 2, 1, [(0, 0.4), (10, 0.95)], is_corrected=False)
    twice = row(4, 2, 1, [(0, 0.4), (10, 0.95)])
    twice["variant"]["updates_per_step"] = 2
    assert bench.comparable([short, twice, other], long) == [other, long]
    long["variant"]["updates_per_step"] = 1
    assert bench.comparable([short, twice, other], long) == [other, long], "kept runs that do not say it have one"


def test_runs_of_other_machines_are_added_and_replace_those_of_the_same_settings(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, here, there = [(0, 0.4), (10, 0.95)], tmp_path / "async_sync.jsonl", tmp_path / "there.jsonl"
    here.write_text("".join(json.dumps(row(bound, 1, 2.0, scores)) + "\n" for bound in (0, 1)))
    there.write_text("".join(json.dumps(row(bound, 1, 1.0, scores)) + "\n" for bound in (1, 2)))
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setattr(bench, "report", lambda *_: True)
    monkeypatch.setattr("sys.argv", ["async_sync.py", "--merge", str(there)])
    assert bench.main() == 0
    kept = [json.loads(line) for line in here.read_text().splitlines()]
    assert [(each["variant"]["max_staleness"], each["ended_s"][0]) for each in kept] == [(0, 2.0), (1, 1.0), (2, 1.0)]


def test_the_comparison_with_trl_generates_a_batch_at_once_and_scores_it_as_the_demo_does(tmp_path: Path) -> None:
    with imported_bench("async_sync_parts.run", "trl_demo", "trl_demo_parts.reward") as [run, trl_demo, reward]:
        variant = run.Variant(2, True, 1, 10, "torch", 1e-4, 5)
        plain, compared = run.config_of(variant, tmp_path), run.config_of(variant, tmp_path, trl_demo.SERVING)
        scores = reward.compute_score(["a"] * 3, ["12", "12<eos>", "13"], ["12"] * 3, [{}] * 3)
    assert scores == [1.0, 1.0, 0.0]
    assert compared.rollout.max_concurrent_groups == compared.replay.groups_per_step == 32
    assert compared.learner.minibatches_per_step == 1
    assert compared.rollout.reward.function_batch and compared.rollout.reward.function_file == Path(reward.__file__)
    assert not plain.rollout.reward.function_batch and plain.learner == compared.learner


def test_only_the_scores_of_an_untimed_run_count(bench: ModuleType) -> None:
    scores = [(0, 0.4), (5, 0.8), (10, 1.0)]
    untimed = [row(bound, 2, step_s, scores) | {"is_timed": False} for bound, step_s in ((0, 9.0), (1, 1.0))]
    measurements, judged = bench.judge([row(0, 1, 2.0, scores), row(1, 1, 1.0, scores), *untimed])
    figures = {each.name: each.rates for each in measurements}
    assert figures["staleness 1, corrected: synchronous / its time"] == [pytest.approx(2.0)]
    assert figures["synchronous: step"] == [2.0] and len(figures["synchronous: score at the end"]) == 2
    assert bench.judge(untimed)[1], "without a time they still have a score"
    assert {bar.name: bar.value for bar in judged}["synchronous: runs that reach 0.9"] == 1
