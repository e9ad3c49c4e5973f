"""Runs the whole loop on one GPU: two vLLM servers, and policy, reference, critic and reward model on GPU ranks.

    PYTHONPATH=.:rollout_server:learner:services:bench python bench/gpu/loop.py [--parts standalone,faults]

It trains examples/arithmetic/ppo.yaml with two FSDP2 ranks of the policy and pushes weights by nccl. It says where the
time of a step goes, the use of the GPU, and the time from the start of the engines to the first step. The part `faults`
kills a server, a rank of the policy and the controller, each in the middle of a push. It needs vLLM, Ray, Redis and
what penstock needs. Each part takes about 3 minutes, most of it the start of vLLM. `--engine torch` tries the script
without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil

from harness import RESULTS, Results, ends_without, run_parts, save, say
from loop_parts.run import SERVERS, LoopRun
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.fleet import Fleet
from penstock.store.redis_client import connect
from soak_parts.processes import rank_process, root_process

NAME = "loop_gpu"
TIMEOUTS_S = {"standalone": 330.0, "split-collocate": 330.0, "faults": 500.0}
START_S = 230.0
TRAIN_S = 120.0
FAULT_S = 90.0
"""How long the run may take to train again after a fault."""
FIRST_STEP_S = 90.0
NUM_WARM = 10
"""First steps that are left out of the time breakdown."""
PHASES = ("wait_s", "forward_s", "update_s", "gather_s")


def bench(part: str, num_steps: int, engine: str) -> Results:
    results = Results()
    folder = Path(tempfile.mkdtemp(prefix="loop-"))
    run = LoopRun(folder, "standalone" if part == "faults" else part, num_steps, engine)
    is_over = False
    try:
        run.start()
        if not run.watch(lambda: run.num_steps >= 1, START_S):
            raise SystemExit(f"no step within {START_S:.0f} s; see {folder}/logs")
        results.add("both engines up after", "s", run.engines_up_at - run.started_at)
        results.bar("first step after the engines are up, s", run.first_step_s, FIRST_STEP_S, at_most=True)
        save(results)
        if part == "faults":
            make_faults(run, results)
        is_over = run.watch(lambda: False, TRAIN_S)
        report(run, results, part, num_steps)
    finally:
        run.stop()
        if is_over:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"logs: {folder}/logs")
    return results


def report(run: LoopRun, results: Results, part: str, num_steps: int) -> None:
    history = run.history()
    results.bar("steps that were trained", len(history), num_steps)
    stat = asyncio.run(_queue_stat(run))
    results.bar("conservation error", abs(stat.conservation_error), 0, at_most=True)
    first, last = (statistics.mean(row["reward_mean"] for row in rows) for rows in (history[:5], history[-10:]))
    results.add("reward of the first 5 steps", "", first)
    results.add("reward of the last 10 steps", "", last)
    if part == "faults":
        results.bar("reward of the last 10 steps / without faults", last / _reward_without_faults(), 0.95)
        return
    results.bar("reward of the last 10 steps - of the first 5", last - first, 0.3)
    rows = history[NUM_WARM:]
    step_s = [row["step_s"] for row in rows]
    results.add("step", "s", *step_s)
    for phase in PHASES:
        results.add(f"step: {phase.removesuffix('_s')}", "s", *(row[phase] for row in rows))
    rest = [row["step_s"] - sum(row[phase] for phase in PHASES) for row in rows]
    results.add("step: rest", "s", *rest)
    results.add("generation of a group", "s", run.group_seconds())
    for phase, seconds in run.push_seconds().items():
        results.add(f"push: {phase}", "s", seconds)
    if run.samples.gpu_percent:
        results.add("GPU busy", "%", statistics.mean(run.samples.gpu_percent))
        results.add("GPU memory", "MB", max(run.samples.gpu_used_mb))


def make_faults(run: LoopRun, results: Results) -> None:
    """Kill a server, a rank and the controller, each in the middle of a push, and wait for new steps after each."""
    for what in ("server", "rank", "controller"):
        victim = _victim(run, what)
        run.watch(lambda: asyncio.run(_is_pushing(run)), 20.0)
        before, killed_at = len(run.lineage.trained), time.monotonic()
        victim.send_signal(signal.SIGKILL)
        say(f"killed the {what}, process {victim.pid}, at step {run.num_steps}")
        wanted = before + 3
        if not run.watch(lambda wanted=wanted: len(run.lineage.trained) >= wanted, FAULT_S):
            raise SystemExit(f"no three steps within {FAULT_S:.0f} s after the {what} was killed")
        results.add(f"three steps after the {what} was killed", "s", time.monotonic() - killed_at)
        save(results)


def _victim(run: LoopRun, what: str) -> psutil.Process:
    if what == "rank":
        victim = rank_process(run.parts["ray"], random.Random(1))
    else:
        victim = root_process(run.parts[SERVERS[0] if what == "server" else "learner"])
    assert victim is not None, f"there is no {what} to kill"
    return victim


async def _is_pushing(run: LoopRun) -> bool:
    """Whether a push is under way. A server is LOADING only then."""
    client = connect(run.config.redis)
    try:
        servers = await Fleet(client, run.config.run).servers()
    finally:
        await client.aclose()
    return any(server.state == "LOADING" for server in servers)


async def _queue_stat(run: LoopRun) -> QueueStat:
    client = connect(run.config.redis)
    try:
        return await RedisReplayQueue(client, run.config.run, run.config.replay).stat()
    finally:
        await client.aclose()


def _reward_without_faults() -> float:
    """From the part `standalone` in the results, or else a reward that the preset always reaches."""
    path = RESULTS / f"{NAME}.json"
    said = json.loads(path.read_text())["measurements"] if path.exists() else []
    name = "standalone: reward of the last 10 steps"
    return next((float(entry["median"]) for entry in said if entry["name"] == name), 0.85)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="standalone,split-collocate,faults")
    parser.add_argument("--steps", type=int, default=80, help="steps of each part")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "torch"])
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    ends_without("a run on a GPU")
    is_met = run_parts(
        NAME,
        "the whole loop on one GPU",
        parts,
        TIMEOUTS_S,
        lambda part: bench(part, arguments.steps, arguments.engine),
    )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
