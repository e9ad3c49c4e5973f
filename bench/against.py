"""Compares this tree with another commit: what runs on a CPU is no slower.

    make bench-against BASE=<commit>
    make bench-against BASE=<commit> ARGS="--parts demo"        one part; the figures of the others stay
    make bench-against BASE=<commit> ARGS="--quick --parts queue,weights"
    make bench-check                                            every part in short form, before a change is done

Both trees run as separate processes, which take turns within each round. The base runs twice in every round, in two
sets of processes: what one differs from the other is the noise of this machine. A bar is the median of the ratios
within the rounds, and its goal is 1 less that noise, but at least 2 % and at most 10 % less. Redis and the clients of
the gateway are this tree's for all. A demo is `penstock demo` of each tree, with the demo's config and fewer steps. A
whole run takes up to 25 minutes, and the machine should do nothing else. Results are written after each part, with the
commits, the day, and the load of the machine in the minute before the program started.

The short form (`--check`) measures every CPU benchmark, each for a minute or two, writes no results, and has one base:
the last commit, which is HEAD if files have changed since, else the one before it. It fails if even the upper end of
the 95 % interval of a ratio is a loss of more than 10 %.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gateway
from against_parts.driver import Meter, Rates
from harness import (
    RESULTS_VARIABLE,
    ROOT,
    SMOKE,
    SMOKE_VARIABLE,
    Bar,
    Measurement,
    Results,
    end_session,
    has_changes,
    listening,
    make_parser,
    ratios,
    record_part,
    redis_process,
    report,
    report_skipped,
    say,
    turns,
)
from penstock.machine import free_port

NAME = "against"
SMALLEST_LOSS, LARGEST_NOISE = 0.02, 0.10
"""A loss below the first counts as noise. More noise than the second excuses no more."""
PACKAGES = ("", "learner", "rollout_server", "services", "tools", "bench", "tests")
DEMO_S = PROGRAM_S = 600.0
"""How long a demo or another whole program may take: far longer than one of an old tree on a busy machine."""
LARGEST_LOSS = 0.10
"""The short form accepts no larger loss, once it is beyond the spread of the rounds."""
DEMO = "import sys; from penstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
NO_REWRITE = "auto-aof-rewrite-percentage 0\n"
THIS, BASE, AGAIN = "this tree", "base", "base again"
Turn = Callable[[], Rates]
"""Measures once. Returns rates by name, where larger is better."""


@dataclass(frozen=True)
class Amounts:
    """How much each turn does."""

    num_rounds: int = 9
    requests: int = 1280
    batches: int = 64
    queue_batches: int = 16
    queue_sizes: tuple[tuple[str, int], ...] = (("1 KB", 1024), ("16 KB", 16 * 1024))
    push_bytes: int = 2**28
    num_pushes: int = 3
    groups_encoded: int = 200
    window_tokens: int = 1_000_000
    demo_rounds: int = 3
    demo_steps: int = 30
    checkpoint_bytes: int = 2**28
    agents_at_once: int = 8
    scale: tuple[str, ...] = ("--servers", "20", "--prompts", "20000", "--seconds", "2", "--generate-s", "1")
    simulate: tuple[str, ...] = ("--settings", "verl")


QUICK = Amounts(
    num_rounds=2, requests=128, batches=8, queue_batches=2, queue_sizes=(("1 KB", 1024),), push_bytes=2**24,
    num_pushes=1, groups_encoded=20, window_tokens=20_000, demo_rounds=1, demo_steps=3, checkpoint_bytes=2**24,
    agents_at_once=2, scale=("--servers", "2", "--prompts", "5000"),
)  # fmt: skip
SHORT = replace(Amounts(), num_rounds=5, queue_batches=8, push_bytes=2**27, window_tokens=300_000, demo_steps=8)
SMALLEST = replace(
    QUICK, num_rounds=1, requests=gateway.CONNECTIONS, queue_batches=1, groups_encoded=2, window_tokens=5_000
)
"""For a smoke run."""


@dataclass(frozen=True)
class Tree:
    """A contender: a folder of code, and where the processes that run it may write."""

    name: str
    code: Path
    folder: Path

    @property
    def options(self) -> dict[str, Any]:
        """Options of Popen with which a process runs this code."""
        environment = os.environ | {"PYTHONPATH": ":".join(str(self.code / package) for package in PACKAGES)}
        environment.pop(SMOKE_VARIABLE, None)  # the amounts are given, and an older tree does not know it
        return {"cwd": self.code, "env": environment}


@contextlib.contextmanager
def gateway_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    rest_port, grpc_port = free_port(), free_port()
    with redis_process(tree.folder / "redis") as (redis_pid, url):
        key, file = tree.folder / "key", tree.folder / "run.yaml"
        key.write_text(gateway.KEY)
        ports = {"port": rest_port, "grpc_port": grpc_port, "api_key_file": str(key)}
        folder = str(tree.folder)
        config = {"run_dir": folder, "model": {"path": folder}, "redis": {"url": url}, "gateway": ports}
        file.write_text(json.dumps(config))  # JSON is YAML
        command = [sys.executable, "-m", "penstock_services.gateway", "--config", str(file)]
        with listening(command, rest_port, grpc_port, **tree.options) as process:
            load, meter = gateway.Load(), Meter("requests", {"the gateway": process.pid, "Redis": redis_pid})

            def turn() -> Rates:
                rates: Rates = {}
                sizes = ((1, amounts.requests, gateway.CONNECTIONS), (gateway.BATCH, amounts.batches, 8))
                for size, *amount in sizes:
                    name, count = f"{size} prompt{'s' * (size > 1)}", amount[0]
                    body, sent = json.dumps({"prompts": [gateway.PROMPT] * size}).encode(), gateway.submission_of(size)
                    rates |= meter.measure(f"REST, {name}", count, load.rest, "", rest_port, body, *amount)
                    rates |= meter.measure(f"gRPC, {name}", count, load.grpc, "", grpc_port, sent, *amount)
                return rates

            yield turn


@contextlib.contextmanager
def driven(tree: Tree, part: str, **arguments: Any) -> Iterator[Turn]:
    """A part that driver.py measures in a process of the tree."""
    command = [sys.executable, str(ROOT / "bench" / "against_parts" / "driver.py"), json.dumps([part, arguments])]
    with (tree.folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True,
            **tree.options,
        )  # fmt: skip
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def answer() -> str:
            if not (line := answers.readline()):
                stderr.seek(0)
                raise SystemExit(f"{part} of {tree.name} ended: {stderr.read()[-2000:]}")
            return str(line)

        def turn() -> Rates:
            questions.write("measure\n")
            questions.flush()
            rates: Rates = json.loads(answer())
            return rates

        try:
            answer()  # it is ready
            yield turn
            questions.close()
            process.wait(60)
        finally:
            end_session(process)


@contextlib.contextmanager
def queue_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    with (
        redis_process(tree.folder / "redis", NO_REWRITE) as (pid, url),
        driven(
            tree, "queue", url=url, redis_pid=pid, num_batches=amounts.queue_batches, sizes=dict(amounts.queue_sizes)
        ) as turn,
    ):
        yield turn


@contextlib.contextmanager
def weights_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    sizes = {"num_bytes": amounts.push_bytes, "num_pushes": amounts.num_pushes}
    with driven(tree, "weights", folder=str(tree.folder), **sizes) as turn:
        yield turn


@contextlib.contextmanager
def codec_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    with driven(tree, "codec", num_groups=amounts.groups_encoded) as turn:
        yield turn


@contextlib.contextmanager
def checkpoints_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    with driven(tree, "checkpoints", folder=str(tree.folder), num_bytes=amounts.checkpoint_bytes) as turn:
        yield turn


@contextlib.contextmanager
def agents_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    with (
        redis_process(tree.folder / "redis", NO_REWRITE) as (_, url),
        driven(tree, "agents", folder=str(tree.folder), url=url, num_agents=amounts.agents_at_once) as turn,
    ):
        yield turn


@contextlib.contextmanager
def program_part(name: str, words: Sequence[str], tree: Tree, rates_of: Callable[[Any], Rates]) -> Iterator[Turn]:
    """A whole program of the tree, with the sizes of its smoke run unless `words` say otherwise. `rates_of` takes the
    rates from its results."""

    def turn() -> Rates:
        options, log = tree.options, tree.folder / "log"
        options["env"][RESULTS_VARIABLE] = str(tree.folder)
        command = [sys.executable, f"bench/{name}.py", "--smoke", *words]
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **options)
            try:
                code = process.wait(PROGRAM_S)
            except subprocess.TimeoutExpired:
                code = 1
            finally:
                end_session(process)
        if code:
            raise SystemExit(f"{name} of {tree.name} did not end well: {log.read_text()[-2000:]}")
        return rates_of(json.loads((tree.folder / f"{name}.json").read_text()))

    yield turn


def scale_part(tree: Tree, amounts: Amounts) -> contextlib.AbstractContextManager[Turn]:
    def rates_of(results: Any) -> Rates:
        costs = {figure["name"]: figure["median"] for figure in results["measurements"] if "CPU of" in figure["name"]}
        return {f"1 / {name}": 1 / cost for name, cost in costs.items() if cost}

    return program_part("scale", amounts.scale, tree, rates_of)


def simulate_part(tree: Tree, amounts: Amounts) -> contextlib.AbstractContextManager[Turn]:
    def rates_of(results: Any) -> Rates:
        bars = {f"{bar['name']} (goal {bar['goal']:g})": bar for bar in results["bars"] if bar["value"]}
        return {name: 1 / bar["value"] if bar["at_most"] else bar["value"] for name, bar in bars.items()}

    return program_part("simulate", amounts.simulate, tree, rates_of)


@contextlib.contextmanager
def rollout_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    with (
        redis_process(tree.folder / "redis", NO_REWRITE) as (_, url),
        driven(tree, "rollout", url=url, window_tokens=amounts.window_tokens) as turn,
    ):
        yield turn


@contextlib.contextmanager
def demo_part(tree: Tree, amounts: Amounts) -> Iterator[Turn]:
    """Whole demos, after one of a single step, which reads all packages from the disk and compiles the tree's code."""

    def turn() -> Rates:
        to_first_s, rest_s = run_demo(tree, amounts.demo_steps)
        return {
            "steps/s after the first step": (amounts.demo_steps - 1) / rest_s,
            "1 / seconds to the end of the first step": 1 / to_first_s,
        }

    if amounts.demo_rounds > 1:
        run_demo(tree, num_steps=1)
    yield turn


def run_demo(tree: Tree, num_steps: int) -> tuple[float, float]:
    """The seconds from the command to the end of the first step, and from there to the end of the last."""
    with tempfile.TemporaryDirectory(dir=tree.folder) as folder:
        given = {"run": "demo", "run_dir": folder, "learner.num_steps": str(num_steps)}
        overrides = [word for field, value in given.items() for word in (f"--{field}", value)]
        command, log = [sys.executable, "-c", DEMO, "demo", *overrides], tree.folder / "demo.log"
        started = time.time()
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, **tree.options)
            try:
                process.wait(DEMO_S)
            except subprocess.TimeoutExpired as error:
                log_end = log.read_text()[-2000:]
                raise SystemExit(f"the demo of {tree.name} took longer than {DEMO_S:.0f} s: {log_end}") from error
            finally:
                process.terminate()  # it ends its processes, which have their own sessions
                process.wait(60)
        if process.returncode:
            raise SystemExit(f"the demo of {tree.name} failed: {log.read_text()[-2000:]}")
        lines = (Path(folder) / "demo" / "metrics.jsonl").read_text().splitlines()
    ended = [json.loads(line)["time"] for line in lines]
    assert len(ended) == num_steps, f"{tree.name} trained {len(ended)} steps"
    return ended[0] - started, ended[-1] - ended[0]


PARTS: dict[str, Callable[[Tree, Amounts], contextlib.AbstractContextManager[Turn]]] = {
    "gateway": gateway_part, "queue": queue_part, "weights": weights_part, "rollout": rollout_part, "codec": codec_part,
    "checkpoints": checkpoints_part, "agents": agents_part, "scale": scale_part, "simulate": simulate_part,
    "demo": demo_part,
}  # fmt: skip
PROGRAMS = ("scale", "simulate", "demo")
"""Parts that start again in every round. They have as many rounds as demos, and no round to warm up."""
SMOKE_PARTS = ("gateway", "queue")
"""What a smoke run measures unless it is told otherwise. The processes of the other parts import torch."""


def measure(part: str, code: dict[str, Path], amounts: Amounts, folder: Path) -> Results:
    """All contenders of a part, in turn. The first round warms up, but not that of a whole program, which always
    starts, nor the only one of a smoke run. There all contenders are the same processes, because their start takes
    longest."""
    measured: dict[str, dict[str, Measurement]] = {}
    warms_up = part not in PROGRAMS and not SMOKE
    num_rounds = amounts.num_rounds if warms_up else amounts.demo_rounds - 1
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Turn] = {}
        for name, where in code.items():
            if SMOKE and contenders:
                contenders[name] = contenders[BASE]
                continue
            tree = Tree(name, where, folder / part / name.replace(" ", "-"))
            tree.folder.mkdir(parents=True)
            contenders[name] = stack.enter_context(PARTS[part](tree, amounts))
        for name, number in turns(contenders, num_rounds):
            rates = contenders[name]()
            for figure, rate in rates.items() if number or not warms_up else ():
                by_contender = measured.setdefault(figure, {n: Measurement(f"{figure}: {n}", "") for n in code})
                by_contender[name].rates.append(rate)
            say(f"{part}: round {number} of {num_rounds}: {name}")
    return judge(part, measured)


def judge(part: str, measured: dict[str, dict[str, Measurement]]) -> Results:
    """The ratios to the base, and a bar for each figure: this tree loses no more than the noise, or, in the short form,
    which has no second base, no more than LARGEST_LOSS beyond the spread."""
    results = Results()
    for figure, by in measured.items():
        if AGAIN not in by:
            ratio = ratios(f"{part}: {figure}: {THIS} / {BASE}", by[THIS], by[BASE])
            results.measurements.append(ratio)
            results.bars.append(Bar(ratio.name, ratio.interval[1], 1 - LARGEST_LOSS))
            continue
        noise = ratios(f"{part}: {figure}: {AGAIN} / {BASE}", by[AGAIN], by[BASE])
        ratio = ratios(f"{part}: {figure}: {THIS} / {BASE}", by[THIS], by[BASE])
        low, high = noise.interval
        margin = min(max(SMALLEST_LOSS, 1 - low, high - 1), LARGEST_NOISE)
        results.measurements += [Measurement(f"{part}: {figure}: {BASE}", "1/s", by[BASE].rates), noise, ratio]
        results.bars.append(Bar(ratio.name, ratio.median, 1 - margin))
    return results


def export(commit: str, folder: Path) -> str:
    """Write the files of a commit to the folder. Returns its full name."""
    name = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--verify", f"{commit}^{{commit}}"], capture_output=True, text=True,
        check=False,
    ).stdout.strip()  # fmt: skip
    if not name:
        raise SystemExit(f"{commit!r} is not a commit of this repository; give one with BASE=<commit>")
    folder.mkdir()
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", name], capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return name


def main() -> int:
    parser = make_parser()
    parser.add_argument("base", nargs="?", help="the commit to compare with (default: HEAD; see --check)")
    parser.add_argument("--parts", default=",".join(SMOKE_PARTS if SMOKE else PARTS))
    parser.add_argument("--quick", action="store_true", help="small amounts and two rounds, and no results written")
    parser.add_argument(
        "--check", action="store_true", help="the short form, against the last commit, and no results written"
    )
    arguments = parser.parse_args()
    amounts = SMALLEST if SMOKE else QUICK if arguments.quick else SHORT if arguments.check else Amounts()
    if not arguments.base:
        arguments.base = "HEAD~1" if arguments.check and not has_changes() else "HEAD"
    load = f"{os.getloadavg()[0]:.1f}"
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]}: give some of {', '.join(PARTS)}")
    if SMOKE:
        report_skipped("another commit", "this tree is compared with itself")
        report_skipped(
            "the demo's start and its steps", "it takes minutes; tests/integration/runs/test_demo.py trains one"
        )
    is_met = True
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        base, where = ("", ROOT) if SMOKE else (export(arguments.base, folder / "base"), folder / "base")
        code = {BASE: where, AGAIN: where, THIS: ROOT}
        if arguments.check:
            del code[AGAIN]
        for part in parts:
            results = measure(part, code, amounts, folder)
            if arguments.quick or arguments.check:
                title = f"{part}: this tree and {base[:12]}"
                is_met &= report(NAME, title, results.measurements, results.bars, keep=False)
            else:
                is_met = record_part(NAME, f"this tree and {base[:12]}", part, results, base=base[:12], load=load)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
