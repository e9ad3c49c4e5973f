"""Compares this tree with another commit: gateway, queue, weight push, rollout server and demo are no slower.

    make bench-against BASE=<commit>
    make bench-against BASE=<commit> ARGS="--parts demo"        one part; the figures of the others stay
    make bench-against BASE=<commit> ARGS="--quick --parts queue,weights"

Both trees run as separate processes, which take turns within each round. The base runs twice in every round, in two
sets of processes: what one differs from the other is the noise of this machine. A bar is the median of the ratios
within the rounds, and its goal is 1 less that noise, but at least 2 % and at most 10 % less. Redis and the clients of
the gateway are this tree's for all. A demo is `penstock demo` of each tree, with the demo's config and fewer steps. A
whole run takes up to 25 minutes, and the machine should do nothing else. Results are written after each part, with the
commits, the day, and the load of the machine in the minute before the program started.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gateway
from against_parts.driver import Meter, Rates
from harness import (
    ROOT,
    SMOKE,
    SMOKE_VARIABLE,
    Bar,
    Measurement,
    Results,
    end_session,
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
DEMO_S = 600.0
"""How long a demo may take: far longer than one of an old tree on a busy machine."""
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


QUICK = Amounts(
    num_rounds=2, requests=128, batches=8, queue_batches=2, queue_sizes=(("1 KB", 1024),), push_bytes=2**24,
    num_pushes=1, groups_encoded=20, window_tokens=20_000, demo_rounds=1, demo_steps=3,
)  # fmt: skip
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
    sizes = {"num_bytes": amounts.push_bytes, "num_pushes": amounts.num_pushes, "num_groups": amounts.groups_encoded}
    with driven(tree, "weights", folder=str(tree.folder), **sizes) as turn:
        yield turn


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


PARTS = {
    "gateway": gateway_part, "queue": queue_part, "weights": weights_part, "rollout": rollout_part, "demo": demo_part,
}  # fmt: skip
SMOKE_PARTS = ("gateway", "queue")
"""What a smoke run measures unless it is told otherwise. The processes of the other parts import torch."""


def measure(part: str, code: dict[str, Path], amounts: Amounts, folder: Path) -> Results:
    """All contenders of a part, in turn. The first round warms up, but not that of the demo, which always starts, nor
    the only one of a smoke run. There all contenders are the same processes, because their start takes longest."""
    measured: dict[str, dict[str, Measurement]] = {}
    warms_up = part != "demo" and not SMOKE
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
    """The ratios to the base, and a bar for each figure: this tree loses no more than the noise."""
    results = Results()
    for figure, by in measured.items():
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
    parser.add_argument("base", nargs="?", default="HEAD", help="the commit to compare with")
    parser.add_argument("--parts", default=",".join(SMOKE_PARTS if SMOKE else PARTS))
    parser.add_argument("--quick", action="store_true", help="small amounts and two rounds, and no results written")
    arguments = parser.parse_args()
    amounts = SMALLEST if SMOKE else QUICK if arguments.quick else Amounts()
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
        for part in parts:
            results = measure(part, code, amounts, folder)
            if arguments.quick:
                is_met &= report(NAME, f"{part}, quickly", results.measurements, results.bars, keep=False)
            else:
                is_met = record_part(NAME, f"this tree and {base[:12]}", part, results, base=base[:12], load=load)
    return 0 if is_met else 1


if __name__ == "__main__":
    raise SystemExit(main())
