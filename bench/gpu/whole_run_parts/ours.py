"""Our side of the whole runs: `penstock up` on one GPU, which the vLLM server and the learner share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from harness import GpuSamples, Results, say
from penstock.config.loading import load_config
from penstock.machine import free_port
from whole_run_parts.steps import LEARNER_TIMES, LearnerTimes, StepLog
from whole_run_parts.task import DATA_SOURCE, Task, write_prompts

HERE = Path(__file__).parent
UP = "import sys; from penstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
STEPS_BEYOND = 2
"""Steps after the last one that counts, so that the server still answers for its metrics when that one has ended."""
KV_CACHE_BYTES = 16 * 2**30
GPU_MEMORY = 0.4
"""The share of the GPU's memory that the server uses."""
PHASES = ("wait_s", "forward_s", "update_s", "gather_s")
STOP_S = 10.0
"""Seconds in which a run must end. Less than whole_run.END_S, after which the part itself is killed."""
POLL_S = 0.05


def settings_of(
    task: Task, model: Path, folder: Path, engine: str, micro_batch_tokens: int, max_staleness: int
) -> dict[str, Any]:
    """A run as a user would configure it for one GPU."""
    is_gpu = engine == "vllm"
    prompts_at_once = 2 * task.num_prompts  # the groups of the next step are generated alongside those of this one
    return {
        "run": "whole-run",
        "run_dir": str(folder / "runs"),
        "model": {"path": str(model), "dtype": "bfloat16" if is_gpu else "float32"},
        "gateway": {"port": free_port()},
        "dataset": {
            "file": str(folder / "prompts.jsonl"), "epochs": 0, "num_samples": task.num_samples,
            "max_tokens": task.response_tokens, "ignore_eos": True, "data_source": DATA_SOURCE,
        },
        "replay": {"groups_per_step": task.num_prompts, "max_staleness": max_staleness},
        "rollout": {
            "max_concurrent_groups": prompts_at_once,
            "engine": {
                "name": engine, "max_model_len": task.max_tokens, "max_num_seqs": prompts_at_once * task.num_samples,
                "gpu_memory_utilization": GPU_MEMORY,
                "extra": {"kv_cache_memory_bytes": KV_CACHE_BYTES} if is_gpu else {},
            },
            "reward": {"function_file": str(HERE / "reward.py")},
        },
        "weights": {"transport": "auto"},
        "learner": {
            "placement": "standalone",
            "policy": {"num_ranks": 1, "gpus_per_rank": 1 if is_gpu else 0},
            "num_steps": task.num_steps + STEPS_BEYOND,
            "lr": task.lr,
            "micro_batch_tokens": micro_batch_tokens,
            "compile": is_gpu,
            "master_dtype": "bfloat16" if is_gpu else "float32",
            "activation_checkpointing": 0,
            "max_logprob_mismatch_nats": 1.0,
            "algorithm": {
                "advantage": {"name": "grpo"},
                "loss": {"name": "ppo", "aggregation": "token-mean"},
                "correction": {"mode": "decoupled"},
                "kl": {"placement": "none"},
            },
        },
    }  # fmt: skip


def write_run(task: Task, settings: dict[str, Any], folder: Path) -> Path:
    """Write the prompts and the config of a run, and check the config. Returns its path."""
    write_prompts(folder / "prompts.jsonl", task)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings))
    load_config(config, [])
    return config


def run_ours(task: Task, settings: dict[str, Any], folder: Path, started_at: float, until: float) -> Results:
    """Train until all steps are done or the time is `until`. Returns the figures of the steps."""
    config, log = write_run(task, settings, folder), folder / "up.log"
    with GpuSamples() as gpu, log.open("w") as output:
        steps = StepLog(task, gpu, started_at, is_judged=settings["replay"]["max_staleness"] > 0)
        command = [sys.executable, "-c", UP, "up", str(config)]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _watch(process, steps, folder / "runs" / "whole-run", until)
        finally:
            stop(process)
            _say_transport(folder)
            if len(steps.tokens) < task.num_steps:
                print_logs(folder, log)
    return steps.finish()


def follow(task: Task, settings: dict[str, Any], folder: Path, run: Path, until: float) -> Results:
    """The figures of the steps of a run that others have started. The run of these settings is only written."""
    write_run(task, settings, folder)
    with GpuSamples() as gpu:
        steps = StepLog(task, gpu, time.time())
        _watch(None, steps, run, until)
    return steps.finish()


def _watch(process: subprocess.Popen[bytes] | None, steps: StepLog, run: Path, until: float) -> None:
    """Record each step as soon as it is in metrics.jsonl."""
    task = steps.task
    counted: list[tuple[float, ServerCounts]] = []
    while len(steps.tokens) < task.num_steps and time.time() < until:
        for row in step_rows(run)[len(steps.tokens) : task.num_steps]:
            if len(steps.tokens) + 1 >= task.num_warm:
                try:
                    counted.append((time.time(), _counts_of_server(run)))
                except httpx.TransportError:
                    if process is not None:
                        raise
                    say("the run that is followed has ended")
            if len(counted) > 1:
                (first, before), (last, after) = counted[0], counted[-1]
                steps.generated_rate = (after.samples - before.samples) * task.response_tokens / (last - first)
                steps.server_paused_share = (after.paused_s - before.paused_s) / (last - first)
                generating_share = (after.generating_s - before.generating_s) / (last - first)
                steps.server_idle_share = 1 - generating_share + steps.server_paused_share
            steps.learner_times.append(LearnerTimes(**{name: row[name] for name in LEARNER_TIMES}))
            phases = {name.removesuffix("_s"): row[name] for name in PHASES}
            steps.staleness.append(row["staleness_mean"])
            rest = {"rest": row["step_s"] - sum(phases.values())}
            steps.add(row["time"], row["response_tokens"], phases | rest)
        if process is not None and process.poll() is not None:
            break
        time.sleep(POLL_S)


def step_rows(run: Path) -> list[dict[str, float]]:
    """The whole lines of metrics.jsonl."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


@dataclass(frozen=True)
class ServerCounts:
    """What the rollout server has counted since its start."""

    samples: float
    generating_s: float
    """Time in which the engine had a request. Pauses are part of it."""
    paused_s: float


def _counts_of_server(run: Path) -> ServerCounts:
    totals: dict[str, float] = defaultdict(float)
    port = json.loads((run / "rollout-0.json").read_text())["metrics_port"]
    for family in text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return ServerCounts(
        totals["penstock_trajectories_produced_total"],
        totals["penstock_rollout_generating_seconds_total"],
        totals["penstock_rollout_paused_seconds_total"],
    )


def stop(process: subprocess.Popen[bytes], timeout_s: float = STOP_S) -> None:
    """End the run as Ctrl-C does. What is left after the deadline ends with this part's session."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _say_transport(folder: Path) -> None:
    """Say how weights were sent: `auto` takes cuda_ipc on a shared GPU."""
    for path in (folder / "runs").rglob("*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if "weights are sent by" in line:
                say(line)


def print_logs(folder: Path, log: Path) -> None:
    """The end of every log, because the folder is gone afterwards."""
    for path in [log, *sorted((folder / "runs").rglob("*.log"))]:
        lines = path.read_text(errors="replace").splitlines()
        print(f"--- the end of {path.name}", *lines[-40:], sep="\n", file=sys.stderr, flush=True)
