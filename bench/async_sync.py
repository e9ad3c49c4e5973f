"""Compares asynchronous with synchronous training on the demo's task: the time until the held-out score is 0.9.

    make bench-async
    python bench/async_sync.py --seeds 1 --staleness 0,2        a part of it; figures of other parts stay

Each run trains examples/arithmetic with `max_staleness` 0 (synchronous), 1, 2, 4 or 8, with the correction
(`decoupled`) and without it (`none`), on the same prompts and seeds. The rollout server has one core and the learner
another. Overlap gives nothing if one of them has nothing to do, so the batch is chosen such that generating and
training it take about the same CPU time: two of the demo's batches (64 prompts of 8 samples), trained with two updates
of 32 prompts each, as PPO does. A sample gives as much training as in the demo, but for the second update the policy
has moved, so a step also computes the log-probs of the proximal policy, and a version is published half as often. On
two ARM cores a batch then takes 0.45 s of CPU time to generate and 0.5 s to train, with all that the learner does
during it. With `--updates 1`, the demo's own batches, generating outweighs training. All groups of a batch are
generated at once. All variants of a seed run after one another, in reverse order for every other seed. The learner
keeps its weights every few steps; they are scored on held-out sums when the run is over, so scoring takes no time of
the run. The time to 0.9 is interpolated between two scores.

A run takes 45 to 75 s on two quiet cores, all nine of a seed about 8 minutes. Every finished run is kept in
results/async_sync.jsonl, and the figures are those of all runs there; `--fresh` forgets them. With `--untimed`, for a
machine that is busy with other things, only the scores of a run count, not its times.

To start a learner and an engine takes longer than a smoke run may. It measures five steps of a run that others have
started, so it neither binds processes to cores nor scores snapshots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from async_sync_parts.run import (
    ARITHMETIC,
    FollowedRun,
    Serving,
    Variant,
    config_of,
    score,
    score_snapshots,
    train,
)
from harness import SMOKE, Bar, Measurement, followed_run, make_parser, report, report_skipped, results_folder
from penstock.config.service import ReplayConfig

NAME = "async_sync"
TITLE = "asynchronous and synchronous training, demo's task"
SCORE_GOAL, SPEED_GOAL, SCORE_REACH = 0.9, 1.6, 0.02
JUDGED_STALENESS = (1, 2, 4)
"""The score has to be that of synchronous training up to here."""
SPEED_STALENESS = ReplayConfig().max_staleness
"""The default, whose time is judged."""
RUN_S = 500.0
RUN = Path(__file__).parent / "async_sync_parts" / "run.py"
SYNCHRONOUS = "synchronous"

Row = Mapping[str, Any]


def variants_of(arguments: argparse.Namespace, seed: int) -> list[Variant]:
    """The runs of a seed. Without staleness there is nothing to correct."""
    shared = {
        "seed": seed, "num_steps": arguments.steps, "engine": arguments.engine, "lr": arguments.lr,
        "snapshot_every": arguments.score_every, "updates_per_step": arguments.updates,
    }  # fmt: skip
    corrections = {"yes": (True,), "no": (False,), "both": (True, False)}[arguments.correction]
    return [
        Variant(max_staleness=bound, is_corrected=is_corrected, **shared)
        for bound in arguments.staleness
        for is_corrected in (corrections if bound else (True,))
    ]


def measure(variant: Variant, serving: Serving = Serving()) -> dict[str, Any]:  # noqa: B008  # frozen
    """Run a variant in a separate process, and score its snapshots. Raises SystemExit if it did not finish."""
    folder = Path(tempfile.mkdtemp(prefix="async-sync-"))
    settings, result = folder / "settings.json", folder / "result.json"
    served = asdict(serving) | {"reward_file": str(serving.reward_file)}
    given = {"variant": asdict(variant), "serving": served, "folder": str(folder), "result": str(result)}
    settings.write_text(json.dumps(given))
    try:
        subprocess.run([sys.executable, str(RUN), str(settings)], check=True, timeout=RUN_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(f"{variant.name}, seed {variant.seed}: {error}; see {folder}/async-sync/logs") from error
    row: dict[str, Any] = json.loads(result.read_text())
    row["scores"] = score_snapshots(folder / "async-sync" / "snapshots")
    shutil.rmtree(folder, ignore_errors=True)
    return row


def measure_followed(num_steps: int) -> dict[str, Any]:
    """The first steps of a run of the demo's task that others have started, scored with the weights of its start."""
    folder, deadline = followed_run(), time.monotonic() + RUN_S
    variant = Variant(2, True, 1, num_steps, "torch", 1e-4, 5)
    while not (folder / "gateway.json").exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"{folder} has not started")
        time.sleep(0.2)
    row = asyncio.run(train(variant, FollowedRun(folder, config_of(variant, folder))))
    reached = score(ARITHMETIC / "model")
    return row | {"scores": [(0, reached), (num_steps, reached)]}


def seconds_to(goal: float, scores: Sequence[tuple[int, float]], ended_s: Sequence[float]) -> float | None:
    """Seconds after which the score first reached `goal`, or None. `scores` are (step, score), in the order of steps;
    `ended_s` has the end of each step, from step 1. Between two scores, score and time are taken to be linear."""
    before_step, before = scores[0]
    for step, reached in scores[1:]:
        if reached >= goal:
            start_s = ended_s[before_step - 1] if before_step else 0.0
            share = (goal - before) / (reached - before) if reached > before else 1.0
            return start_s + max(0.0, share) * (ended_s[step - 1] - start_s)
        before_step, before = step, reached
    return None


def judge(rows: Sequence[Row]) -> tuple[list[Measurement], list[Bar]]:
    """The figures of all variants over their seeds, and the bars, which compare runs of the same seed."""
    by_variant: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        variant = Variant(**row["variant"])
        by_variant[variant.name][variant.seed] = row
    measurements, speeds, bars = [], {}, []
    synchronous = by_variant.get(SYNCHRONOUS, {})
    for name, runs in by_variant.items():
        reached = _times(runs)
        num_reached = sum(any(score >= SCORE_GOAL for _, score in row["scores"]) for row in runs.values())
        reaching = Measurement(f"{name}: runs that reach {SCORE_GOAL}", "", [num_reached / len(runs)])
        if Variant(**next(iter(runs.values()))["variant"]).is_corrected:
            bars.append(Bar(reaching.name, reaching.median, 1))
        else:
            measurements.append(reaching)
        if reached:
            measurements.append(Measurement(f"{name}: time to {SCORE_GOAL}", "s", list(reached.values())))
        measurements += _of_timed(name, [row for row in runs.values() if _is_timed(row)])
        measurements.append(
            Measurement(f"{name}: score at the end", "", [row["scores"][-1][1] for row in runs.values()])
        )
        base = {} if name == SYNCHRONOUS else _times(synchronous)
        both = [seed for seed in base if seed in reached]
        if both:
            speed = [base[seed] / reached[seed] for seed in both]
            whole = [synchronous[seed]["ended_s"][-1] / runs[seed]["ended_s"][-1] for seed in both]
            measurements.append(Measurement(f"{name}: {SYNCHRONOUS} / its time", "×", speed))
            measurements.append(Measurement(f"{name}: {SYNCHRONOUS} / its time for all steps", "×", whole))
            speeds[name] = statistics.median(speed)
    bars += _bars(by_variant, speeds)
    return measurements, bars


def _is_timed(row: Row) -> bool:
    return bool(row.get("is_timed", True))


def _times(runs: Mapping[int, Row]) -> dict[int, float]:
    """Seconds to the goal, by seed, of the timed runs that reach it."""
    found = {
        seed: seconds_to(SCORE_GOAL, row["scores"], row["ended_s"]) for seed, row in runs.items() if _is_timed(row)
    }
    return {seed: value for seed, value in found.items() if value is not None}


def _of_timed(name: str, rows: Sequence[Row]) -> list[Measurement]:
    """The length of a step, and how busy both cores were."""
    if not rows:
        return []
    busy = {side: [row["cpu_s"][side] / row["ended_s"][-1] for row in rows] for side in ("learner", "rollout-0")}
    return [
        Measurement(f"{name}: step", "s", [statistics.median(row["step_s"]) for row in rows]),
        *(Measurement(f"{name}: {side.partition('-')[0]}'s core busy", "", shares) for side, shares in busy.items()),
    ]


def _bars(by_variant: Mapping[str, Mapping[int, Row]], speeds: Mapping[str, float]) -> list[Bar]:
    judged = [f"staleness {bound}, corrected" for bound in JUDGED_STALENESS]
    timed = f"staleness {SPEED_STALENESS}, corrected"
    bars = []
    if timed in speeds:
        bars.append(Bar(f"{SYNCHRONOUS} / {timed}: time to {SCORE_GOAL}", speeds[timed], SPEED_GOAL))
    synchronous = by_variant.get(SYNCHRONOUS, {})
    for name in judged:
        runs = by_variant.get(name, {})
        both = [seed for seed in runs if seed in synchronous]
        if both:
            reaches = _reaches([synchronous[seed] for seed in both], [runs[seed] for seed in both])
            for when, reach in (("after the last step", reaches[-1]), ("after any step", max(reaches))):
                bars.append(Bar(f"{name}: score {when}, away from {SYNCHRONOUS}", reach, SCORE_REACH, at_most=True))
    return bars


def _reaches(ours: Sequence[Row], theirs: Sequence[Row]) -> list[float]:
    """How far the mean scores of two variants are from each other, after each step that was scored."""
    means = [
        [statistics.mean(score for _, score in scores) for scores in zip(*(row["scores"] for row in rows), strict=True)]
        for rows in (ours, theirs)
    ]
    return [abs(one - other) for one, other in zip(*means, strict=True)]


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> int:
    parser = make_parser()
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="with commas")
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 2, 4, 8], help="max_staleness, with commas")
    parser.add_argument("--correction", choices=["yes", "no", "both"], default="both")
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--updates", type=int, default=2, help="updates of a step, with 32 groups each")
    parser.add_argument("--score-every", type=int, default=5, help="steps between two scores")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--engine", default="torch", choices=["torch", "vllm"])
    parser.add_argument("--untimed", action="store_true", help="this machine is busy: only scores count")
    parser.add_argument("--fresh", action="store_true", help="forget the runs of earlier calls")
    arguments = parser.parse_args()
    if SMOKE:
        report_skipped("training with each staleness", "it takes minutes; a run of others is judged as each of two")
        row = measure_followed(num_steps=5)
        rows = [row | {"variant": asdict(replace(Variant(**row["variant"]), max_staleness=bound))} for bound in (0, 2)]
        return 0 if report(NAME, TITLE, *judge(rows)) else 1
    kept = results_folder() / f"{NAME}.jsonl"
    if arguments.fresh:
        kept.unlink(missing_ok=True)
    is_met = True
    for number, seed in enumerate(arguments.seeds):
        for variant in variants_of(arguments, seed)[:: -1 if number % 2 else 1]:
            print(f"{variant.name}, seed {seed}", flush=True)
            is_met = _keep(kept, measure(variant) | {"is_timed": not arguments.untimed})
    return 0 if is_met else 1


def _keep(kept: Path, row: Row) -> bool:
    """Add a run to the kept ones, and report all that can be compared with it. Returns whether every bar is met."""
    others = [old for old in _kept_rows(kept) if Variant(**old["variant"]) != Variant(**row["variant"])]
    kept.write_text("".join(json.dumps(entry) + "\n" for entry in [*others, row]))
    return report(NAME, TITLE, *judge(comparable(others, row)))


def comparable(others: Sequence[Row], row: Row) -> list[Row]:
    """The runs of `others` with as many steps and updates, the same engine and learning rate as `row`, and `row`."""
    free = ("max_staleness", "is_corrected", "seed")

    def settings(entry: Row) -> dict[str, Any]:
        variant = asdict(Variant(**entry["variant"]))
        return {name: value for name, value in variant.items() if name not in free}

    return [*(other for other in others if settings(other) == settings(row)), row]


def _kept_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
