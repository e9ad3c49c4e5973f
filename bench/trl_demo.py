"""Compares TRL's GRPOTrainer with ours on the demo's task, on two cores: the time until the held-out score is 0.9.

    make bench-trl_demo ARGS="--trl-python PYTHON"

PYTHON is an interpreter with TRL 1.16.0 and datasets; by default it is this one. Both train examples/arithmetic on the
same prompts in the same order, with 32 prompts of 8 samples a step, GRPO, AdamW with the same settings, no KL penalty
and float32. Both score the samples with the same function, and call it with many samples at once. TRL generates with
transformers and has both cores for everything. Ours has one core for the engine and one for the learner, and generates
while it trains (`max_staleness` 2, corrected), a batch at once as TRL does. Neither is timed while it starts, and TRL
is not timed while it writes weights. The weights of every fifth step are scored on the same held-out sums when the run
is over. Seeds alternate who comes first.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from async_sync import RUN_S, SCORE_GOAL, measure, measure_followed, numbers, seconds_to
from async_sync_parts.run import Serving, Variant, score_snapshots
from harness import SMOKE, Bar, Measurement, make_parser, report, report_skipped, sized

NAME = "trl_demo"
TRL_RUN = Path(__file__).parent / "trl_demo_parts" / "run.py"
MAX_STALENESS = 2
SERVING = Serving(
    reward_file=Path(__file__).parent / "trl_demo_parts" / "reward.py",
    scores_by_prompt=True,
    reward_processes=1,
)
OURS, TRL = "ours", "TRL"


def measure_trl(python: str, variant: Variant) -> dict[str, Any]:
    """Train with TRL in a separate process, and score the weights that it kept."""
    with tempfile.TemporaryDirectory(prefix="trl-demo-") as folder:
        given = {"seed": variant.seed, "num_steps": variant.num_steps, "lr": variant.lr, "folder": folder}
        command = [python, str(TRL_RUN), json.dumps(given | {"keep_every": variant.snapshot_every})]
        try:
            subprocess.run(command, check=True, timeout=RUN_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"TRL, seed {variant.seed}: {error}") from error
        row: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
        return row | {"scores": score_snapshots(Path(folder) / "snapshots")}


def figures(name: str, rows: list[dict[str, Any]], times: list[float | None]) -> list[Measurement]:
    found = {
        f"time to {SCORE_GOAL}": times,
        "step": [row["ended_s"][-1] / len(row["ended_s"]) for row in rows],
        "score at the end": [row["scores"][-1][1] for row in rows],
    }
    units = {"score at the end": ""}
    return [
        Measurement(f"{name}: {what}", units.get(what, "s"), [value for value in values if value is not None])
        for what, values in found.items()
        if any(value is not None for value in values)
    ]


def main() -> int:
    parser = make_parser()
    parser.add_argument("--seeds", type=numbers, default=sized([1, 2], [1]), help="with commas")
    parser.add_argument("--steps", type=int, default=sized(60, 5))
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--trl-python", default=sys.executable, help="an interpreter with TRL 1.16.0 and datasets")
    arguments = parser.parse_args()
    contenders = [OURS, TRL]
    if subprocess.run(
        [arguments.trl_python, "-c", "import trl, datasets"], capture_output=True, check=False
    ).returncode:
        if not SMOKE:
            raise SystemExit(f"{arguments.trl_python} has no TRL: pip install trl==1.16.0 datasets, or --trl-python")
        report_skipped("TRL", "it is not installed")
        contenders = [OURS]
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for number, seed in enumerate(arguments.seeds):
        variant = Variant(MAX_STALENESS, True, seed, arguments.steps, "torch", arguments.lr, 5)
        for name in contenders[:: -1 if number % 2 else 1]:
            print(f"{name}, seed {seed}", flush=True)
            if name == TRL:
                rows[name].append(measure_trl(arguments.trl_python, variant))
            else:
                rows[name].append(measure_followed(arguments.steps) if SMOKE else measure(variant, SERVING))
    times = {
        name: [seconds_to(SCORE_GOAL, row["scores"], row["ended_s"]) for row in found] for name, found in rows.items()
    }
    pairs = zip(times[OURS], times.get(TRL, []), strict=not SMOKE)
    ratios = [trl / ours for ours, trl in pairs if ours and trl]
    measurements = [figure for name, found in rows.items() for figure in figures(name, found, times[name])]
    bars = [
        Bar(f"{name}: runs that reach {SCORE_GOAL}", sum(map(bool, found)) / len(found), 1)
        for name, found in times.items()
    ]
    if ratios:
        compared = Measurement(f"TRL / ours: time to {SCORE_GOAL}", "×", ratios)
        measurements.append(compared)
        bars.append(Bar(compared.name, compared.median, 1))
    return 0 if report(NAME, "TRL and ours on the demo's task", measurements, bars) else 1


if __name__ == "__main__":
    sys.exit(main())
