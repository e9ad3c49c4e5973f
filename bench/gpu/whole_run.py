"""Compares whole GRPO runs on one GPU: ours, TRL's GRPOTrainer and verl, all with vLLM, on the same model and prompts.

    PYTHONPATH=.:rollout_server:learner:services:bench python bench/gpu/whole_run.py [--parts ours-0.5b,trl-0.5b]

All train a random Qwen2 in bfloat16 with AdamW for 15 steps of 32 prompts with 8 samples each, without recomputation,
with the same rule as reward. The first 3 steps are skipped. Ours is `penstock up` with one vLLM server and one learner
rank, which share the GPU and run concurrently; weights go from one to the other inside it (cuda_ipc). TRL runs
vLLM in its own process (`colocate`), verl next to its trainer; both generate and train in turns. All correct for the
difference between the engine's log-probs and their own, for which TRL and verl compute those of the samples once more;
ours takes them from the pass of the update.

Each part is a process with its own deadline. A part can be run again, after the others, as `ours-0.5b@2`: ratios are
taken of parts of the same round, and the median of the rounds is judged. Parts with a variant in their name can be
added: `ours-sync-0.5b` generates and trains in turns (`max_staleness` 0), `trl-rows32-0.5b` trains 32 sequences at a
time, `trl-recomputed-0.5b` recomputes activations; whole_run_parts/verl_runs.py lists those of verl. The bars compare
our plain part with the best of each peer. What overlap gives is the rate of tokens over that of the synchronous part;
its ideal is what it would be if the longer of generation and training, each as long as in the synchronous part, took
the whole step. It needs vLLM, Ray, Redis, what penstock needs, and TRL and datasets for the parts of TRL. The parts of
verl (`verl-0.5b,verl-1.5b`) need an environment with verl and without TRL. `--engine torch` with the parts
`ours-tiny,trl-tiny` tries the script without a GPU. A run takes longer to start than a smoke run may last: that writes
the config and the prompts of ours, and measures the steps of a run that others have started.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from harness import (
    SMOKE,
    Bar,
    Measurement,
    Results,
    earlier,
    followed_run,
    make_parser,
    report,
    report_skipped,
    run_parts,
    saved,
    say,
    sized,
)
from learner_parts.models import SHAPES
from whole_run_parts.steps import RATE
from whole_run_parts.task import Task

NAME = "whole_run"
TITLE = "whole GRPO runs on one GPU"
PARTS = "ours-0.5b,trl-0.5b,ours-1.5b,trl-1.5b"
GOAL = 1.3
END_S = 12.0
"""Seconds before its deadline at which a part ends its run."""
MODEL_S = 90.0
ROWS = {"tiny": 4, "0.5b": 64, "1.5b": 32}
"""Sequences in a forward and backward pass of TRL."""
MICRO_BATCH_TOKENS = 16384
PEERS = {"trl": "TRL", "verl": "verl"}
SYNC, OVERLAP = "sync", "overlap"
ROUND = "@"
"""Stands before the round in the name of a part that is run again."""


def bench(part: str, arguments: argparse.Namespace) -> Results:
    """Run one part. Its errors are printed whole: there may be no second attempt."""
    until = time.time() + arguments.timeout - END_S
    who, variants, name = _parsed(part)
    task = _task_of(arguments, name)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory(prefix="whole-run-", ignore_cleanup_errors=True) as folder:
        try:
            model = Path() if SMOKE else model_folder(name)
            say(f"{part}: starting")
            run = {"ours": _ours, "trl": _trl, "verl": _verl}[who]
            return run(task, model, Path(folder), arguments.engine, time.time(), until, variants)
        except BaseException:
            traceback.print_exc()
            raise


def model_folder(name: str) -> Path:
    """The folder of the model. The first part makes it, and the later ones use it again."""
    folder = Path(tempfile.gettempdir()) / f"penstock-whole-run-{name}"
    if not folder.exists():
        say("making the model")
        making = folder.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        command = [sys.executable, "-m", "whole_run_parts.task", name, str(making)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(command, check=True, timeout=MODEL_S, env=environment)
        making.rename(folder)
    return folder


def _ours(
    task: Task, model: Path, folder: Path, engine: str, started_at: float, until: float, variants: list[str]
) -> Results:
    from whole_run_parts.ours import follow, run_ours, settings_of

    _refuse_unknown(variants, (SYNC,))
    settings = settings_of(task, model, folder, engine, MICRO_BATCH_TOKENS, max_staleness=0 if SYNC in variants else 2)
    if SMOKE:
        return follow(task, settings, folder, followed_run(), until)
    return run_ours(task, settings, folder, started_at, until)


def _trl(
    task: Task, model: Path, folder: Path, engine: str, started_at: float, until: float, variants: list[str]
) -> Results:
    rows = next((int(word.removeprefix("rows")) for word in variants if word.startswith("rows")), ROWS[task.model])
    _refuse_unknown(variants, ("recomputed", f"rows{rows}"))
    from whole_run_parts.trl_runs import run_trl, settings_of

    settings = settings_of(task, folder, engine, min(rows, task.num_sequences), "recomputed" in variants)
    return run_trl(task, model, settings, started_at, until)


def _verl(
    task: Task, model: Path, folder: Path, engine: str, started_at: float, until: float, variants: list[str]
) -> Results:
    from whole_run_parts.verl_runs import VARIANTS, run_verl, settings_of

    if engine != "vllm":
        raise SystemExit("verl trains on GPUs only: run its parts with --engine vllm")
    _refuse_unknown(variants, VARIANTS)
    prompts = folder / "prompts.parquet"
    settings = settings_of(task, model, prompts, MICRO_BATCH_TOKENS, variants)
    return run_verl(task, settings, prompts, started_at, until)


def _refuse_unknown(variants: Sequence[str], known: Sequence[str]) -> None:
    if unknown := set(variants) - set(known):
        raise SystemExit(f"unknown variants {', '.join(sorted(unknown))}: there are {', '.join(known)}")


def _parsed(part: str) -> tuple[str, list[str], str]:
    """Contender, variants and model of a part. Its round is skipped."""
    who, *variants, model = part.partition(ROUND)[0].split("-")
    return who, variants, model


def _task_of(arguments: argparse.Namespace, model: str) -> Task:
    return Task(
        model, arguments.prompts, arguments.samples, arguments.prompt_tokens, arguments.tokens, arguments.steps,
        min(3, arguments.steps - 2),
    )  # fmt: skip


def compare() -> bool:
    """Add the ratios to each peer, of the models that both have run, to the saved results. Returns whether every bar is
    met. A peer is represented by its fastest variant."""
    ratios = {who: f"ours / {peer}" for who, peer in PEERS.items()}
    results = earlier(NAME, [*ratios.values(), OVERLAP])
    results.measurements += overlap(results.measurements)
    for who, ratio_name in ratios.items():
        for model in SHAPES:
            found = ratios_of_rounds(results.measurements, who, model)
            if found:
                figure = Measurement(f"{ratio_name}: {model}, response tokens a second", "×", found)
                results.measurements.append(figure)
                results.bars.append(Bar(figure.name, figure.median, GOAL))
    return report(NAME, TITLE, results.measurements, results.bars, parts=saved(NAME).get("parts", {}))


def ratios_of_rounds(measurements: Sequence[Measurement], who: str, model: str) -> list[float]:
    """Our rate of tokens over that of the peer's fastest variant, for each round in which both ran."""
    rounds = _rounds(measurements)
    peer: dict[str, float] = {}
    for name, rates in rounds.items():
        part, _, figure = name.partition(": ")
        if figure == RATE and _parsed(part)[::2] == (who, model):
            peer |= {each: max(rate, peer.get(each, 0.0)) for each, rate in rates.items()}
    return [rate / peer[each] for each, rate in sorted(rounds[f"ours-{model}: {RATE}"].items()) if each in peer]


def _rounds(measurements: Sequence[Measurement]) -> defaultdict[str, dict[str, float]]:
    """The median of each figure in each round, by its name without the round."""
    rounds: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for each in measurements:
        part, colon, figure = each.name.partition(": ")
        name, _, round_name = part.partition(ROUND)
        rounds[name + colon + figure][round_name] = each.median
    return rounds


def overlap(measurements: Sequence[Measurement]) -> list[Measurement]:
    """What it gives to generate during training, for the models that ran both ways, in each round in which they did.
    Without overlap a step waits for its groups first, so its waiting is the generation."""
    rounds = _rounds(measurements)
    figures = []
    for model in SHAPES:
        sync = f"ours-{SYNC}-{model}"
        names = (f"ours-{model}: {RATE}", f"{sync}: {RATE}", f"{sync}: step", f"{sync}: step: wait")
        found = [rounds[name] for name in names]
        gains, ideals = [], []
        for round_name in sorted(set.intersection(*map(set, found))):
            rate, sync_rate, step, wait = (values[round_name] for values in found)
            gains.append(rate / sync_rate)
            ideals.append(step / max(wait, step - wait))
        if gains:
            of_ideals = [gain / ideal for gain, ideal in zip(gains, ideals, strict=True)]
            figures += [
                Measurement(f"{OVERLAP}: {model}, response tokens / those of synchronous training", "×", gains),
                Measurement(f"{OVERLAP}: {model}, ideal", "×", ideals),
                Measurement(f"{OVERLAP}: {model}, of its ideal", "", of_ideals),
            ]
    return figures


def main() -> int:
    parser = make_parser()
    parser.add_argument(
        "--parts", default=sized(PARTS, "ours-tiny"), help="WHO-MODEL or WHO-VARIANT-MODEL, with commas"
    )
    parser.add_argument("--engine", default="vllm", choices=["vllm", "torch"])
    parser.add_argument("--steps", type=int, default=sized(15, 5))
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256, help="tokens of every response")
    parser.add_argument("--timeout", type=float, default=sized(240.0, 550.0), help="deadline of each part, in seconds")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    for part in parts:
        who, _, model = _parsed(part)
        if who not in ("ours", *PEERS) or model not in SHAPES:
            parser.error(f"unknown part {part}: give ours-, trl- or verl-MODEL, MODEL one of {', '.join(SHAPES)}")
    if SMOKE:
        report_skipped("a run on a GPU, TRL's and verl's", "there is no GPU; a run of others is followed")
    ended_well = run_parts(
        NAME, TITLE, parts, dict.fromkeys(parts, arguments.timeout), lambda part: bench(part, arguments)
    )
    if "PENSTOCK_BENCH_WRITE" in os.environ:
        return 0
    return 0 if compare() and ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
