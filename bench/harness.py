"""Code that all benchmarks share: alternate the contenders in one run, take medians, judge bars, print and save.

The machine is shared and noisy, so no absolute time is judged. A bar is a ratio between two contenders whose rounds
alternate in the same run. Programs for a GPU run in parts (`run_parts`): each part is a process with a deadline.

Every program takes `--smoke`: the smallest sizes (`sized`), one round, no bar judged. `make test` runs all of them so.
A smoke run measures on a CPU and reports what it skips (`report_skipped`). It writes its results to the folder that
PENSTOCK_BENCH_RESULTS names, and nowhere without it. Programs that start a whole run follow the run in the folder
PENSTOCK_BENCH_RUN instead (`followed_run`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from penstock.config.run import RunConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
STARTED_AT = "PENSTOCK_BENCH_STARTED"
WRITE_TO = "PENSTOCK_BENCH_WRITE"
SMOKE_VARIABLE = "PENSTOCK_BENCH_SMOKE"
RESULTS_VARIABLE = "PENSTOCK_BENCH_RESULTS"
RUN_VARIABLE = "PENSTOCK_BENCH_RUN"
CALL_TIMEOUT_S = 120.0
GPU_SAMPLE_S = 1.0
T = TypeVar("T")

if "--smoke" in sys.argv:
    sys.argv.remove("--smoke")
    os.environ[SMOKE_VARIABLE] = "1"
SMOKE = SMOKE_VARIABLE in os.environ
"""Whether this is a smoke run. Processes that a benchmark starts inherit it."""
os.environ.setdefault(STARTED_AT, str(time.time()))
if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))  # for stand-ins of tests/support


def sized(full: T, smoke: T) -> T:
    """A size of the benchmark, and the one of its smoke run."""
    return smoke if SMOKE else full


def report_skipped(what: str, why: str) -> None:
    """Print what this smoke run does not measure."""
    print(f"smoke run: not measured: {what}: {why}", flush=True)


def followed_run() -> Path:
    """The folder of the run that a smoke run follows. It may not be there yet."""
    if RUN_VARIABLE not in os.environ:
        raise SystemExit(f"a smoke run of this program follows a run: set {RUN_VARIABLE} to the folder of one")
    return Path(os.environ[RUN_VARIABLE])


def make_parser() -> argparse.ArgumentParser:
    """The options of every program. `--help` prints the first paragraph of its docstring, and nothing is measured."""
    first, _, _ = (sys.modules["__main__"].__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=" ".join(first.split()))
    parser.add_argument("--smoke", action="store_true", help="measure the smallest sizes once, and judge nothing")
    return parser


@dataclass
class Measurement:
    """The rates of one contender, one per round."""

    name: str
    unit: str
    rates: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.rates) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rates, n=4)
        if high == low:
            return 0.0
        return (high - low) / 2 / self.median if self.median else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % confidence interval of the median, from order statistics. It assumes no distribution of the
        rates."""
        ordered, reach = sorted(self.rates), 0.98 * math.sqrt(len(self.rates))
        last = len(ordered) - 1
        return ordered[max(0, math.floor(last / 2 - reach))], ordered[min(last, math.ceil(last / 2 + reach))]


@dataclass(frozen=True)
class Bar:
    """A value that a benchmark must reach."""

    name: str
    value: float
    goal: float
    at_most: bool = False
    """True if smaller is better."""

    @property
    def ok(self) -> bool:
        return self.value <= self.goal if self.at_most else self.value >= self.goal


def turns(names: Iterable[T], num_rounds: int) -> Iterator[tuple[T, int]]:
    """Every name once per round, in reverse order in every other round, with the number of the round. Round 0 is a
    warm-up, which is discarded."""
    listed = list(names)
    for number in range(num_rounds + 1):
        for name in listed[:: -1 if number % 2 else 1]:
            yield name, number


def alternate(
    contenders: dict[str, Callable[[], float]], num_rounds: int, unit: str, between: Callable[[], None] | None = None
) -> dict[str, Measurement]:
    """Run every contender in turn. Each returns its rate. `between` is called before each round."""
    measured = {name: Measurement(name, unit) for name in contenders}
    begun = -1
    for name, number in turns(contenders, num_rounds):
        if between is not None and number > begun:
            between()
        begun = number
        rate = contenders[name]()
        if number:
            measured[name].rates.append(rate)
    return measured


def ratios(name: str, ours: Measurement, limit: Measurement) -> Measurement:
    """The ratio within each round. Noise that affects both contenders cancels."""
    return Measurement(name, "", [a / b for a, b in zip(ours.rates, limit.rates, strict=True)])


def median_ratio(ours: Measurement, limit: Measurement) -> float:
    return ratios("", ours, limit).median


def earlier(name: str, parts: Sequence[str]) -> Results:
    """The entries of results/NAME.json that do not begin with one of these parts, which are measured again."""
    results = {"measurements": [], "bars": []} | saved(name)

    def is_other(entry: str) -> bool:
        return entry.partition(": ")[0] not in parts

    return Results(
        [Measurement(m["name"], m["unit"], m["rates"]) for m in results["measurements"] if is_other(m["name"])],
        [Bar(b["name"], b["value"], b["goal"], b["at_most"]) for b in results["bars"] if is_other(b["name"])],
    )


def results_file(name: str) -> Path:
    """Where the results of this kind of machine are: NAME.json, or NAME.KIND.json if that has those of another kind."""
    path, kind = results_folder() / f"{name}.json", platform.machine()
    if path.exists() and not json.loads(path.read_text())["machine"].startswith(f"{kind},"):
        return path.with_name(f"{name}.{kind}.json")
    return path


def saved(name: str) -> dict[str, Any]:
    """What the results of this kind of machine say. Empty if there are none."""
    path = results_file(name)
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)


def has_changes() -> bool:
    """Whether the code differs from HEAD. What a benchmark before this may have written does not count."""
    records = [f":!{path}" for path in ("bench/results", "docs/benchmarks.md")]
    return bool(_git("diff", "--quiet", "HEAD", "--", ".", *records).returncode)


def provenance() -> dict[str, str]:
    """What the figures were measured on: the commit, with `+changes` if the code had any, the day and the machine."""
    commit = _git("rev-parse", "--short=12", "HEAD").stdout.strip()
    changes = "+changes" if commit and has_changes() else ""
    return {
        "commit": os.environ.get("PENSTOCK_BENCH_COMMIT") or commit + changes or "unknown",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def results_folder() -> Path:
    """Where results are read and written. A smoke run never touches the results that are kept."""
    return Path(os.environ.get(RESULTS_VARIABLE, os.devnull)) if SMOKE else RESULTS


def write_results(name: str, result: Mapping[str, Any]) -> None:
    """Write the results of this kind of machine with their provenance, if there is a folder for them."""
    if results_folder().is_dir():
        results_file(name).write_text(json.dumps(provenance() | dict(result), indent=1) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in (columns[0], "unit") else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def report(
    name: str, title: str, measurements: list[Measurement], bars: list[Bar], *, keep: bool = True, **facts: Any
) -> bool:
    """Print both tables, write NAME.json with these facts if it is to be kept, and return whether every bar is met. A
    smoke run meets all bars."""
    medians = [f"{m.median:,.1f}" if m.median > 10 else f"{m.median:.4f}" for m in measurements]
    rows = [(m.name, median, f"±{m.spread:.0%}", m.unit) for m, median in zip(measurements, medians, strict=True)]
    print_table(title, ("contender", "median", "spread", "unit"), rows)
    goals = [(b.name, f"{b.value:.3f}", f"{'≤' if b.at_most else '≥'} {b.goal:g}", b.ok) for b in bars]
    print_table("bars", ("bar", "value", "goal", "met"), [(*goal, "yes" if ok else "[red]no") for *goal, ok in goals])
    result = facts | {
        "measurements": [
            {"name": m.name, "unit": m.unit, "median": m.median, "interval": m.interval, "spread": m.spread,
             "rates": [float(f"{rate:.5g}") for rate in m.rates]}
            for m in measurements
        ],
        "bars": [asdict(bar) | {"ok": bar.ok} for bar in bars],
    }  # fmt: skip
    if keep:
        write_results(name, result)
    return SMOKE or all(bar.ok for bar in bars)


def record_part(name: str, title: str, part: str, results: Results, **facts: str) -> bool:
    """Report the results of a part, whose names begin with it, and write them with these facts. What NAME.json says of
    other parts stays, and what those were measured on. Returns whether every bar of all parts is met."""
    others, parts = earlier(name, [part]), saved(name).get("parts", {})
    measurements, bars = others.measurements + results.measurements, others.bars + results.bars
    return report(name, title, measurements, bars, parts=parts | {part: provenance() | facts})


# ── processes ──


@contextlib.contextmanager
def listening(command: Sequence[str], *ports: int, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens on these ports, started with these options of Popen. It is killed at the end of the
    block."""
    from penstock.machine import wait_for_port

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        for port in ports:
            assert wait_for_port("127.0.0.1", port, timeout_s=120), f"{command[:3]} did not start"
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def redis_process(folder: Path, settings: str = "") -> Iterator[tuple[int, str]]:
    """A private Redis with the settings of a run and these. Yields its process id and its URL."""
    from penstock.machine import free_port
    from penstock_tools.local.private_redis import find_redis_server, write_config

    port = free_port()
    config, url = write_config(folder, port)
    config.write_text(config.read_text() + settings)
    with listening([find_redis_server(), str(config)], port) as process:
        yield process.pid, url


@contextlib.contextmanager
def gateway_process(config: RunConfig, config_file: Path) -> Iterator[int]:
    """The gateway of a run, whose config is written to the file. Yields its process id."""
    from penstock.config.loading import dump_config

    config_file.write_text(dump_config(config))
    command = [sys.executable, "-m", "penstock_services.gateway", "--config", str(config_file)]
    with listening(command, config.gateway.port, config.gateway.grpc_port) as process:
        yield process.pid


# ── programs for a GPU ──


def say(text: str) -> None:
    started = float(os.environ.get(STARTED_AT, time.time()))
    print(f"[{time.time() - started:6.1f} s] {text}", flush=True)


@dataclass
class Results:
    measurements: list[Measurement] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def add(self, name: str, unit: str, *values: float) -> None:
        self.measurements.append(Measurement(name, unit, list(values)))
        say(f"{name}: {self.measurements[-1].median:,.3f} {unit}")

    def bar(self, name: str, value: float, goal: float, at_most: bool = False) -> None:
        self.bars.append(Bar(name, value, goal, at_most))
        say(f"bar: {name}: {value:.3f}, goal {'≤' if at_most else '≥'} {goal:g}")


def run_parts(
    name: str, title: str, parts: Sequence[str], timeouts_s: Mapping[str, float], run: Callable[[str], Results]
) -> bool:
    """Start this program again for each part, which calls `run` there. Returns whether every bar is met. A smoke run
    calls `run` here."""
    if WRITE_TO in os.environ:
        part, _, _ = os.environ[WRITE_TO].partition("=")
        save(run(part))
        return True
    met = True
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for part in parts:
            if SMOKE:
                results = run(part)
                results.bars.append(Bar("part ended well", 1, 1))
            else:
                results = _start(part, Path(folder) / f"{part}.json", timeouts_s[part])
            named = Results(
                [replace(m, name=f"{part}: {m.name}") for m in results.measurements],
                [replace(b, name=f"{part}: {b.name}") for b in results.bars],
            )
            met = record_part(name, title, part, named)
    return met


def run_models(
    name: str, title: str, models: str, timeouts_s: Mapping[str, float], run: Callable[[str, bool], Results]
) -> int:
    """The program whose parts are models, which `run` measures, compiled or not. Returns its exit code."""
    parser = make_parser()
    parser.add_argument("--models", default=models)
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    arguments = parser.parse_args()
    compiles = not arguments.no_compile

    def run_part(part: str) -> Results:
        return run(part, compiles and part != "tiny")

    return 0 if run_parts(name, title, arguments.models.split(","), timeouts_s, run_part) else 1


def save(results: Results) -> None:
    """Save the results so far. A part calls this repeatedly, so that a missed deadline loses only later figures."""
    if WRITE_TO in os.environ:
        _, _, path = os.environ[WRITE_TO].partition("=")
        Path(path).write_text(json.dumps(asdict(results)))


def _start(part: str, written: Path, timeout_s: float) -> Results:
    """Run a part. Returns the results that it saved, and a bar for whether it ended well. Ends all its processes."""
    environment = os.environ | {WRITE_TO: f"{part}={written}"}
    process = subprocess.Popen([sys.executable, *sys.argv], start_new_session=True, env=environment)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        print(f"part {part} took longer than {timeout_s:.0f} s", flush=True)
    finally:
        end_session(process)
    ended_well = Bar("part ended well", float(process.returncode == 0), 1)
    saved = json.loads(written.read_text()) if written.exists() else {"measurements": [], "bars": []}
    return Results([Measurement(**m) for m in saved["measurements"]], [ended_well, *(Bar(**b) for b in saved["bars"])])


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the process group of the part, which contains everything that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


class Child:
    """Calls `make(*arguments)` in a fresh process. `call` calls methods of the object that it returned. In a smoke run
    the process is a fork, which need not import everything again."""

    def __init__(self, make: Callable[..., Any], *arguments: Any) -> None:
        context: Any = multiprocessing.get_context(sized("spawn", "fork"))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0  # it has started

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        self.ask(method, *arguments)
        return self.answer(method, timeout_s)

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call. `answer` waits for its end, so that several processes can work at the same time."""
        self._pipe.send((method, arguments))

    def answer(self, method: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"{method} took longer than {timeout_s:g} s")
        answer, failure = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)
        return answer

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    served = make(*arguments)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(served, method)(*arguments), ""))
        except Exception:
            pipe.send((None, traceback.format_exc()))


def be_a_host_of_its_own() -> None:
    """Let this process share a GPU with other ranks. NCCL refuses two ranks on one GPU of one host, so each says that
    it is a separate host, and they meet over sockets on loopback."""
    os.environ["NCCL_HOSTID"] = f"pid-{os.getpid()}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_IB_DISABLE"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def gpu_use() -> tuple[float, float] | None:
    """Percent of the time in which the GPU was busy, and MB of its memory in use."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        percent, used = (float(part) for part in text.splitlines()[0].split(","))
    except (subprocess.SubprocessError, ValueError, IndexError):
        return None
    return percent, used


class GpuSamples:
    """Samples the GPU once a second, in a thread, while the context is open. Without a GPU there are no samples."""

    def __init__(self) -> None:
        self.percent: list[float] = []
        self.used_mb: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def _sample(self) -> None:
        while not self._ended.wait(GPU_SAMPLE_S):
            used = gpu_use()
            if used is None:
                return
            self.percent.append(used[0])
            self.used_mb.append(used[1])
