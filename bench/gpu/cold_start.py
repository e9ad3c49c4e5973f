"""Measures how long a run takes from `penstock up` to the end of its first step, with empty caches and with kept ones.

    PYTHONPATH=.:rollout_server:learner:services:bench python bench/gpu/cold_start.py [--parts cold,warm]

Both parts start the same run on one GPU, in a new folder: a random 0.5B Qwen2, one vLLM server and one compiled learner
rank, 8 prompts of 8 samples a step. `cold` begins with an empty `cache_dir`, and `warm` with what `cold` left there.
Everything else is the same: the packages are imported once before, so that neither part reads them from the disk first.
The time of every phase of every process is recorded as soon as the phase ends, and vLLM's own lines about times with
it. Both parts take 5 minutes at most. `--engine torch --model tiny --compile` tries the script without a
GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from learner_models import SHAPES
from parts import STARTED_AT, earlier_results, run_parts, save
from weights_results import Results, say
from whole_run import MICRO_BATCH_TOKENS, model_folder
from whole_run_ours import UP, print_logs, settings_of, step_rows, stop
from whole_run_task import Task, write_prompts

from harness import Bar, Measurement, report
from penstock.client import SyncPenstockClient
from penstock.compiled_code import VARIABLES
from penstock.errors import PenstockError

NAME = "cold_start"
TITLE = "from `penstock up` to the first step, on one GPU"
ENDS_S = {"cold": 205.0, "warm": 280.0}
"""Seconds after the start of the benchmark at which the run of a part is given up. What `cold` leaves is for `warm`."""
TIMEOUTS_S = {"cold": 225.0, "warm": 295.0}
GOAL = 0.5
FIRST_STEP = "start to the end of the first step"
RATIO = "warm / cold"
IMPORTS = {"vllm": "import vllm.v1.engine.async_llm, ray, transformers", "torch": "import ray, transformers"}
IMPORT_S = 60.0
POLL_S = 0.25
_TIMED = re.compile(
    r"(?:^|\] )([A-Za-z][^\n\[\]:]{3,80}?)(?: took| takes| finished in|:) (\d+(?:\.\d+)?) ?s(?:ecs?|econds?)?\b",
    re.MULTILINE,
)
"""Lines of vLLM such as `Loading weights took 1.52 seconds`."""


@dataclass
class Timeline:
    """The phases of a start, in seconds since its command was given. Every change saves the figures so far."""

    started_at: float
    phases: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    """For each process its phases and when they began."""
    ended_s: float | None = None
    """When the first step had ended."""
    of_engine: dict[str, float] = field(default_factory=dict)
    """Seconds that vLLM says its parts took."""

    def follow(self, parts: Any) -> None:
        """Take over the phases of a status of the run."""
        found = {
            part.component: [(phase.name, phase.entered_at_ms / 1000 - self.started_at) for phase in part.phases]
            for part in parts
        }
        for component, phases in found.items():
            for name, at in phases[len(self.phases.get(component, ())) :]:
                say(f"after {at:6.1f} s {component}: {name}")
        if found != self.phases:
            self.phases = found
            save(self.results())

    def results(self) -> Results:
        results = Results()
        for component, phases in self.phases.items():
            ends = [at for _, at in phases[1:]] + [self.ended_s]
            if phases:
                results.measurements.append(Measurement(f"{component}: before its first phase", "s", [phases[0][1]]))
            for (name, begin), end in zip(phases, ends, strict=True):
                if end is not None and end >= begin:
                    results.measurements.append(Measurement(f"{component}: {name}", "s", [end - begin]))
        for name, seconds in self.of_engine.items():
            results.measurements.append(Measurement(f"vLLM: {name}", "s", [seconds]))
        if self.ended_s is not None:
            results.measurements.append(Measurement(FIRST_STEP, "s", [self.ended_s]))
        return results


def bench(part: str, arguments: argparse.Namespace) -> Results:
    """Start the run once. Its errors are printed whole: there may be no second attempt."""
    until = float(os.environ[STARTED_AT]) + ENDS_S[part]
    # A step beyond the first keeps the learner up while the first one is recorded.
    task = Task(arguments.model, num_prompts=8, response_tokens=64, num_steps=2, num_warm=1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    cache = Path(tempfile.gettempdir()) / "penstock-cold-start-cache"
    with tempfile.TemporaryDirectory(prefix="cold-start-", ignore_cleanup_errors=True) as folder:
        try:
            model = _prepare(arguments)
            if part == "cold":
                shutil.rmtree(cache, ignore_errors=True)
            settings = settings_of(task, model, Path(folder), arguments.engine, "decoupled", MICRO_BATCH_TOKENS)
            settings["learner"]["compile"] |= arguments.compile
            return _start(task, settings | {"cache_dir": str(cache)}, Path(folder), until)
        except BaseException:
            traceback.print_exc()
            raise


def _prepare(arguments: argparse.Namespace) -> Path:
    """Make the model, and import beside it what the processes will import."""
    importing = subprocess.Popen([sys.executable, "-c", IMPORTS[arguments.engine]])
    try:
        return model_folder(arguments.model)
    finally:
        try:
            importing.wait(IMPORT_S)
        except subprocess.TimeoutExpired:
            importing.kill()


def _start(task: Task, settings: dict[str, Any], folder: Path, until: float) -> Results:
    write_prompts(folder / "prompts.jsonl", task)
    config, log, run = folder / "run.yaml", folder / "up.log", folder / "runs" / "whole-run"
    config.write_text(yaml.safe_dump(settings))
    with log.open("w") as output:
        timeline = Timeline(time.time())
        process = subprocess.Popen([sys.executable, "-c", UP, "up", str(config)], stdout=output, stderr=output)
        try:
            _watch(process, timeline, run, until)
        finally:
            stop(process)
            if timeline.ended_s is None:
                print_logs(folder, log)
    _read_engine_log(timeline, run / "logs" / "rollout-0.log")
    results = timeline.results()
    results.bar("the first step was trained", float(timeline.ended_s is not None), 1)
    size = sum(path.stat().st_size for path in Path(settings["cache_dir"]).rglob("*") if path.is_file())
    results.add("size of the cache", "MB", size / 1e6)
    return results


def _watch(process: subprocess.Popen[bytes], timeline: Timeline, run: Path, until: float) -> None:
    """Follow the phases until the first step is in metrics.jsonl."""
    client: SyncPenstockClient | None = None
    while time.time() < until and process.poll() is None:
        time.sleep(POLL_S)
        try:
            if client is None and (run / "gateway.json").exists():
                client = SyncPenstockClient.from_run_dir(run)
                say(f"after {time.time() - timeline.started_at:6.1f} s the gateway is up")
            if client is not None:
                timeline.follow(client.get_run().parts)
        except PenstockError as error:
            say(f"no status: {error}")
        if rows := step_rows(run):
            timeline.ended_s = rows[0]["time"] - timeline.started_at
            say(f"after {timeline.ended_s:6.1f} s the first step has ended: {_times(rows[0])}")
            break
    if client is not None:
        client.close()


def _times(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in row.items() if name.endswith("_s"))


def _read_engine_log(timeline: Timeline, log: Path) -> None:
    text = log.read_text(errors="replace") if log.exists() else ""
    for name, seconds in _TIMED.findall(text):
        timeline.of_engine[" ".join(name.split())] = float(seconds)


def compare() -> bool:
    """Add the ratio of both parts to the saved results. Returns whether every bar is met."""
    results = earlier_results(NAME, [RATIO])
    totals = {m.name.partition(": ")[0]: m.median for m in results.measurements if m.name.endswith(f": {FIRST_STEP}")}
    if totals.keys() >= {"cold", "warm"}:
        ratio = totals["warm"] / totals["cold"]
        results.measurements.append(Measurement(f"{RATIO}: {FIRST_STEP}", "×", [ratio]))
        results.bars.append(Bar(f"{RATIO}: {FIRST_STEP}", ratio, GOAL, at_most=True))
    return report(NAME, TITLE, results.measurements, results.bars)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="cold,warm")
    parser.add_argument("--engine", default="vllm", choices=["vllm", "torch"])
    parser.add_argument("--model", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true", help="compile the learner without a GPU too")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in TIMEOUTS_S]:
        parser.error(f"unknown part {unknown[0]}: give cold, warm or cold,warm")
    ended_well = run_parts(NAME, TITLE, parts, TIMEOUTS_S, lambda part: bench(part, arguments))
    if "PENSTOCK_BENCH_WRITE" in os.environ:
        return 0
    return 0 if compare() and ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
