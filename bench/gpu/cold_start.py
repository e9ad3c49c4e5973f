"""Measures how long a run takes from `penstock up` to the end of its first step, and what it spends the time on.

    PYTHONPATH=.:rollout_server:learner:services:bench python bench/gpu/cold_start.py [--parts imports,before,cold,warm]

All starts are of the same run on one GPU, in a new folder: a random 0.5B Qwen2, one vLLM server and one compiled
learner rank, 8 prompts of 8 samples a step.

| part      | what it measures                                                                                     |
|-----------|------------------------------------------------------------------------------------------------------|
| `imports` | importing vLLM for the first time on this machine, and again                                         |
| `before`  | a start with an empty `cache_dir`, where vLLM's processes import one after another (no standby)      |
| `cold`    | a start with an empty `cache_dir`                                                                    |
| `warm`    | a start with the `cache_dir` that `cold` has left                                                    |

`before` differs from `cold` in vLLM alone: the learner and the servers start together with the gateway in both.
Packages are imported once before the first start, so that no start reads them from the disk first, or compiles them.
The time of every phase of every process is recorded as soon as the phase ends, and the times of vLLM's own lines with
it. Each part has its own deadline, and its figures are saved even if it misses that. All parts take about 7 minutes,
and 10 at most; `--parts cold,warm` takes 4. `--engine torch --model tiny --compile` tries the script without a GPU, and
so does `--cpu --model tiny` with vLLM. A smoke run writes the config and the prompts of a start, and measures the start
of a run that others begin, once as `cold` and once as `warm`.
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

from harness import (
    SMOKE,
    WRITE_TO,
    Bar,
    Measurement,
    Results,
    earlier,
    followed_run,
    make_parser,
    report,
    report_skipped,
    run_parts,
    save,
    saved,
    say,
    sized,
)
from learner_parts.models import SHAPES
from penstock.client import SyncPenstockClient
from penstock.errors import PenstockError
from penstock.machine import VARIABLES
from penstock_rollout.engines.vllm.standby import SWITCH
from whole_run import MICRO_BATCH_TOKENS, model_folder
from whole_run_parts.ours import UP, print_logs, settings_of, step_rows, stop, write_run
from whole_run_parts.task import Task

NAME = "cold_start"
TITLE = "from `penstock up` to the first step, on one GPU"
TIMEOUTS_S = {"imports": 95.0, "before": 190.0, "cold": 160.0, "warm": 125.0}
FOLLOWED_S = 550.0
STOP_S = 35.0
"""How long before its timeout a part stops waiting for its run, to end it and save the figures."""
GOALS = {("warm", "before"): 0.5, ("warm", "cold"): 0.5, ("cold", "before"): 0.8}
"""Upper bound on the time of the first part divided by that of the second."""
FIRST_STEP = "start to the end of the first step"
IMPORTS = sized(
    {"vllm": "import vllm.v1.engine.core, ray, transformers", "torch": "import ray, transformers"},
    {"vllm": "import json", "torch": "import json"},
)
MEASURED = "import resource; {}; r = resource.getrusage(resource.RUSAGE_SELF); print(r.ru_utime + r.ru_stime)"
IMPORT_S = 90.0
POLL_S = 0.25
_EVENTS = {
    "Initializing a V1 LLM engine": "EngineCore begins",
    "Starting to load model": "EngineCore loads the model",
    "Model loading took": "the model is loaded",
    "Dynamo bytecode transform time": "torch.compile has traced the model",
    "torch.compile takes": "torch.compile has ended",
    "GPU KV cache size": "memory is measured",
    "Graph capturing finished": "CUDA graphs are captured",
    "init engine": "EngineCore is ready",
}
"""Lines of vLLM's log, and what their times tell."""
_STAMPED = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d) \[[\w.]+:\d+\] (.*)")
_TIMED = re.compile(
    r"(?:^|\] )([A-Za-z][^\n\[\]:]{3,80}?)(?: took| takes| finished in|:) (\d+(?:\.\d+)?) ?s(?:ecs?|econds?)?\b",
    re.MULTILINE,
)
"""Lines of vLLM such as `Loading weights took 1.52 seconds`."""
_IMPORTED = re.compile(r"process imported vLLM in (\d+\.\d+) s; waited for (\d+\.\d+) s")


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
    events: dict[str, float] = field(default_factory=dict)
    """When vLLM wrote the lines of _EVENTS, to the second."""

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
        for name, seconds in self.events.items():
            results.measurements.append(Measurement(f"after the start, {name}", "s", [seconds]))
        for name, seconds in self.of_engine.items():
            results.measurements.append(Measurement(f"vLLM: {name}", "s", [seconds]))
        if self.ended_s is not None:
            results.measurements.append(Measurement(FIRST_STEP, "s", [self.ended_s]))
        return results

    def print_shares(self) -> None:
        """Print each process's phases as shares of the whole start. Processes run concurrently."""
        if self.ended_s is None:
            return
        for component in self.phases:
            for measurement in self.results().measurements:
                if measurement.name.startswith(f"{component}: "):
                    say(f"{measurement.median / self.ended_s:6.1%} {measurement.median:6.1f} s {measurement.name}")


def bench(part: str, arguments: argparse.Namespace) -> Results:
    """Run a part. Errors are printed whole: there may be no second attempt."""
    until = time.time() + sized(TIMEOUTS_S[part], FOLLOWED_S)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["VLLM_LOGGING_LEVEL"] = "INFO"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # packages are compiled once, as in an image
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    if arguments.engine == "vllm":
        os.environ[SWITCH] = "0" if part == "before" else "1"
    if arguments.cpu:
        os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    try:
        return _imports(arguments, until) if part == "imports" else _run(part, arguments, until - STOP_S)
    except BaseException:
        traceback.print_exc()
        raise


def _imports(arguments: argparse.Namespace, until: float) -> Results:
    results = Results()
    for name in ("first", "again"):
        started = time.time()
        command = [sys.executable, "-c", MEASURED.format(IMPORTS[arguments.engine])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=until - started)
        results.add(f"{name}: importing {arguments.engine}", "s", time.time() - started)
        results.add(f"{name}: CPU time of it", "s", float(done.stdout.split()[-1]))
        save(results)
    return results


def _run(part: str, arguments: argparse.Namespace, until: float) -> Results:
    # A step beyond the first keeps the learner up while the first one is recorded.
    task = Task(arguments.model, num_prompts=8, response_tokens=64, num_steps=2, num_warm=1)
    caches = Path(tempfile.gettempdir())
    cache = caches / ("penstock-cold-start-before" if part == "before" else "penstock-cold-start-cache")
    with tempfile.TemporaryDirectory(prefix="cold-start-", ignore_cleanup_errors=True) as folder:
        model = Path() if SMOKE else model_folder(arguments.model)
        if part != "warm" and not SMOKE:
            shutil.rmtree(cache, ignore_errors=True)
        settings = settings_of(task, model, Path(folder), arguments.engine, MICRO_BATCH_TOKENS, max_staleness=2)
        settings["learner"]["compile"] |= arguments.compile
        if arguments.cpu:
            settings["model"]["dtype"] = "float32"
            settings["rollout"]["engine"]["extra"] = {}
            settings["learner"] |= {"compile": False, "master_dtype": "float32"}
            settings["learner"]["policy"]["gpus_per_rank"] = 0
        return _start(task, settings | {"cache_dir": str(cache)}, Path(folder), until)


def prepare(arguments: argparse.Namespace, parts: list[str]) -> None:
    """Make the model, and meanwhile import what the processes will import, before the first start is timed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    importing = None
    if "imports" not in parts:
        importing = subprocess.Popen([sys.executable, "-c", IMPORTS[arguments.engine]], env=environment)
    try:
        model_folder(arguments.model)
    finally:
        if importing is not None:
            try:
                importing.wait(IMPORT_S)
            except subprocess.TimeoutExpired:
                importing.kill()


def _start(task: Task, settings: dict[str, Any], folder: Path, until: float) -> Results:
    config, log, run = write_run(task, settings, folder), folder / "up.log", folder / "runs" / "whole-run"
    if SMOKE:
        return _follow(followed_run(), until)
    with log.open("w") as output:
        timeline = Timeline(time.time())
        process = subprocess.Popen([sys.executable, "-c", UP, "up", str(config)], stdout=output, stderr=output)
        try:
            _watch(process, timeline, run, until)
        finally:
            stop(process)
            if timeline.ended_s is None:
                print_logs(folder, log)
    results = _results(timeline, run)
    size = sum(path.stat().st_size for path in Path(settings["cache_dir"]).rglob("*") if path.is_file())
    results.add("size of the cache", "MB", size / 1e6)
    return results


def _follow(run: Path, until: float) -> Results:
    """The start of a run that others begin, which was when its config was written."""
    config = run / "config.yaml"
    while not config.exists() and time.time() < until:
        time.sleep(POLL_S)
    timeline = Timeline(config.stat().st_mtime)
    _watch(None, timeline, run, until)
    return _results(timeline, run)


def _results(timeline: Timeline, run: Path) -> Results:
    _read_engine_log(timeline, run / "logs" / "rollout-0.log")
    timeline.print_shares()
    results = timeline.results()
    save(results)
    results.bar("the first step was trained", float(timeline.ended_s is not None), 1)
    return results


def _watch(process: subprocess.Popen[bytes] | None, timeline: Timeline, run: Path, until: float) -> None:
    """Follow the phases until the first step is in metrics.jsonl."""
    client: SyncPenstockClient | None = None
    while time.time() < until and (process is None or process.poll() is None):
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
    if match := _IMPORTED.search(text):
        timeline.of_engine["EngineCore's process imports"] = float(match[1])
        timeline.of_engine["the server waits for that"] = float(match[2])
    year = time.localtime(timeline.started_at).tm_year
    for month, day, hour, minute, second, line in _STAMPED.findall(text):
        at = time.mktime((year, int(month), int(day), int(hour), int(minute), int(second), 0, 0, -1))
        for words, event in _EVENTS.items():
            if line.startswith(words):
                timeline.events.setdefault(event, at - timeline.started_at)


def compare() -> bool:
    """Add the ratios of the parts to the saved results. Returns whether every bar is met."""
    names = [f"{part} / {other}" for part, other in GOALS]
    results = earlier(NAME, names)
    totals = {m.name.partition(": ")[0]: m.median for m in results.measurements if m.name.endswith(f": {FIRST_STEP}")}
    for (part, other), goal in GOALS.items():
        if part in totals and other in totals:
            name, ratio = f"{part} / {other}: {FIRST_STEP}", totals[part] / totals[other]
            results.measurements.append(Measurement(name, "×", [ratio]))
            results.bars.append(Bar(name, ratio, goal, at_most=True))
    return report(NAME, TITLE, results.measurements, results.bars, parts=saved(NAME).get("parts", {}))


def main() -> int:
    parser = make_parser()
    parser.add_argument("--parts", default=sized(",".join(TIMEOUTS_S), "imports,cold,warm"))
    parser.add_argument("--engine", default="vllm", choices=["vllm", "torch"])
    parser.add_argument("--model", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true", help="compile the learner without a GPU too")
    parser.add_argument("--cpu", action="store_true", help="vLLM without a GPU, started as on one")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in TIMEOUTS_S]:
        parser.error(f"unknown part {unknown[0]}: give some of {', '.join(TIMEOUTS_S)}")
    if SMOKE:
        report_skipped(
            "a start on a GPU, with kept and with empty caches", "there is no GPU; a run of others is followed"
        )
    elif WRITE_TO not in os.environ:
        prepare(arguments, parts)
    ended_well = run_parts(NAME, TITLE, parts, TIMEOUTS_S, lambda part: bench(part, arguments))
    if WRITE_TO in os.environ:
        return 0
    return 0 if compare() and ended_well else 1


if __name__ == "__main__":
    sys.exit(main())
