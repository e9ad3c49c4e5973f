"""The soak: a whole run on this machine while its parts are killed, one every 30 s on average, for an hour.

    make soak                                        one hour
    make soak ARGS="--minutes 8 --seed 3"            a pilot

Redis, gateway, feed, two rollout servers (torch engine), the learner's controller, and a Ray cluster with two FSDP
ranks run as separate processes (soak_parts/processes.py). All but Ray's own processes are targets of the killer; a
target is killed (75 %), asked to end (15 %) or suspended for 3 to 10 s (10 %). A part that ended is started again with
a kubelet's back-off. Kills begin after a minute of undisturbed training and end with the measured time.

What is judged:

- Lost: prompts that were submitted and are neither trained, nor waiting, in flight or queued at the end. Dead letters
  count as lost.
- Doubled: groups that the steps of the final lineage trained, beyond the prompts of the final ledger.
- Conservation: `admitted = trained + expired + dead-lettered + queued + in flight`, every minute. Redis must answer
  nine of ten of these checks. The prompts and groups that are not finished, counted every 10 s, must not become more.
- Memory: the resident memory of all parts in the last quarter against the first, and that of Redis against the second,
  because Redis keeps recomputed log-probs for a quarter of an hour. Its lists of results and of the newest 1,000
  versions are skipped: they are bounded, and fill for most of the hour.
- ETTR = effective steps · median step / wall time. A step is effective if the final weights contain it: one that was
  trained again after the learner went back to a checkpoint counts once. Its duration is the median duration of the
  run's effective steps, so no step counts for more because a fault made it slow. The wall time runs from the first
  possible kill to the last. The first start of the run is not in it; every later start is.

Two more ratios are reported without a goal: the effective steps at the pace of the undisturbed minutes before the first
kill, and the sum of the effective steps' own durations, which include waiting for groups.

The steps are those of the tiny model of examples/arithmetic on this machine's CPU, as fast as it can: no step is
lengthened. Progress is printed every 30 s. Results are saved every minute, so a run that is cut off still reports.

Ray, ranks and engines take longer to start than a smoke run may last. It does all of the above for a few seconds with
stand-ins for all parts but Redis (soak_parts/stand_ins.py), and reads the log and counts the groups of another run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from harness import SMOKE, Bar, followed_run, make_parser, report_skipped, sized, write_results
from penstock.config.loading import dump_config, load_config
from penstock.config.run import RunConfig
from penstock.errors import PenstockError
from penstock.machine import free_port, wait_for_port
from penstock.replay.queue import RedisReplayQueue
from penstock.replay.queue_types import QueueStat
from penstock.store.keys import RunKeys
from penstock.store.redis_client import RedisClient, connect
from penstock_learner.checkpoints import CheckpointStore, read_state
from penstock_learner.term import Ledger
from penstock_tools.local.private_redis import find_redis_server, write_config
from penstock_tools.local.processes import ProcessGroup
from soak_parts.lineage import MARKERS, Account, Lineage, make_account
from soak_parts.processes import Killer, Part, host_description, rank_process, root_process
from soak_parts.stand_ins import use_stand_ins

CONFIG = Path(__file__).parent / "soak_parts" / "soak.yaml"
START_S = 180.0
DRAIN_S = 180.0
LINE_S, CHECK_S, COUNT_S = sized((30.0, 60.0, 10.0), (1.0, 1.0, 1.0))
"""Time between two lines of progress, two checks of conservation and memory, and two counts of unfinished work."""
FOLLOWED_S = 550.0
POLL_S = 0.2
STALL_S = 240.0
"""A run without a step for this long has failed."""
SAMPLES_PER_GROUP = 8
TARGETS = ("redis", "gateway", "feed", "rollout-0", "rollout-1", "learner", "rank")


@dataclass
class Observations:
    """What the run showed, minute by minute."""

    conservation_errors: list[int] = field(default_factory=list)
    rss: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Bytes of each part in every minute; 0 while the part was down."""
    redis_bytes: list[int] = field(default_factory=list)
    unfinished: list[int] = field(default_factory=list)
    """Prompts and groups that wait, are in flight or queued: what the queue holds beyond its counters. They follow the
    kills up and down, so they are counted often."""
    unanswered: int = 0
    """Minutes in which Redis did not answer the check in time."""

    @property
    def answered_share(self) -> float:
        num_checks = self.unanswered + len(self.conservation_errors)
        return len(self.conservation_errors) / num_checks if num_checks else 0.0


class Soak:
    """One run in one folder. `run` ends every process that it started, however it ends."""

    def __init__(
        self, folder: Path, minutes: float, seed: int, mean_kill_s: float, targets: Collection[str], calm_s: float
    ) -> None:
        self.calm_s = calm_s
        self.minutes = minutes
        self.seed = seed
        self.processes = ProcessGroup(folder / "logs")
        self.config, self.parts = make_parts(folder)
        if SMOKE:
            use_stand_ins(self.parts, port_of(self.parts["ray"]), folder)
        self.kept_up = dict(self.parts)
        """The parts that are started again whenever they end."""
        self.lineage = Lineage(folder / "logs" / "learner.log")
        dice = random.Random(seed)
        possible = {name: partial(root_process, part) for name, part in self.parts.items()}
        possible["rank"] = partial(rank_process, self.parts["ray"], dice)
        self.killer = Killer(seed, mean_kill_s, {name: possible[name] for name in targets})
        self.observed = Observations()
        self.client: RedisClient = connect(self.config.redis, patient=True)
        self.queue = RedisReplayQueue(self.client, self.config.run, self.config.replay)
        self.begun_at = self.ended_at = 0.0
        self.calm_step_s = 0.0
        self.checking: asyncio.Task[None] | None = None
        self.counting: asyncio.Task[None] | None = None
        self.lost = self.doubled = -1
        self.final: QueueStat | None = None

    async def run(self) -> None:
        try:
            self._start()
            await self._watch_until(lambda: len(self.lineage.trained) >= 5, START_S)
            calm_from = len(self.lineage.trained) - 1
            await self._watch(self.calm_s)
            self.calm_step_s = statistics.median(trained.seconds for trained in self.lineage.trained[calm_from:])
            self.begun_at = time.monotonic()
            self.killer.begin()
            await self._watch(self.minutes * 60, is_measured=True)
            self.ended_at = time.monotonic()
            self.killer.end()
            for task in (self.checking, self.counting):
                if task is not None:
                    await task
            await self._take_stock()
        finally:
            self.ended_at = self.ended_at or time.monotonic()
            self.killer.end()
            await asyncio.to_thread(self.processes.stop)
            await self.client.aclose()

    def _start(self) -> None:
        for name, part in self.parts.items():
            part.start(self.processes)
            if name in ("redis", "ray") and not wait_for_port("127.0.0.1", port_of(part), timeout_s=60):
                raise SystemExit(f"{name} did not start; see {self.processes.log_folder}")
        self.lineage.begin_start(time.monotonic())

    async def _watch_until(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise SystemExit(f"the run is not up after {timeout_s:.0f} s; see {self.processes.log_folder}")
            self._poll()
            await asyncio.sleep(POLL_S)

    async def _watch(self, seconds: float, *, is_measured: bool = False) -> None:
        """Restart, kill and look for `seconds`. Raises SystemExit if the run does not move any more."""
        end = time.monotonic() + seconds
        next_line = time.monotonic() + LINE_S
        next_check, next_count = time.monotonic() + CHECK_S, time.monotonic() + COUNT_S
        while (now := time.monotonic()) < end:
            self._poll()
            if now - self.lineage.trained[-1].at > STALL_S:
                raise SystemExit(f"no step for {STALL_S:.0f} s; see {self.processes.log_folder}")
            if is_measured and now > next_line:
                next_line = now + LINE_S
                self._print_progress()
            if is_measured and now > next_check:
                next_check = now + CHECK_S
                self.checking = asyncio.create_task(self._check())
            if is_measured and now > next_count:
                next_count = now + COUNT_S
                self.counting = asyncio.create_task(self._count())
            await asyncio.sleep(POLL_S)

    def _poll(self) -> None:
        now = time.monotonic()
        for name, part in self.kept_up.items():
            if part.keep_up(self.processes) and name == "learner":
                self.lineage.begin_start(now)
        self.lineage.poll(now)
        if fault := self.killer.poll():
            print(f"{fault.at - self.begun_at:6.0f} s  {fault.signal} {fault.part}", flush=True)

    async def _check(self) -> None:
        """Conservation and memory, once a minute, during the kills. Redis may be down; the client waits for it."""
        for name, part in self.parts.items():
            self.observed.rss[name].append(part.rss_bytes())
        try:
            async with asyncio.timeout(50):
                stat = await self.queue.stat()
                self.observed.conservation_errors.append(stat.conservation_error)
                self.observed.redis_bytes.append(await self._redis_bytes())
        except (TimeoutError, PenstockError, OSError):
            self.observed.unanswered += 1
        self.save()

    async def _count(self) -> None:
        """Count the unfinished prompts and groups, if Redis answers before the next count."""
        with suppress(TimeoutError, PenstockError, OSError):
            async with asyncio.timeout(0.9 * COUNT_S):
                stat = await self.queue.stat()
                self.observed.unfinished.append(stat.pending_prompts + stat.in_flight + stat.queued)

    async def _redis_bytes(self) -> int:
        keys = RunKeys(self.config.run)
        bounded = [keys.results, keys.policies, keys.policy_versions]
        sizes = [await self.client.memory_usage(key, samples=0) for key in bounded]
        return int((await self.client.info("memory"))["used_memory"]) - sum(size or 0 for size in sizes)

    # ── the end ──

    async def _take_stock(self) -> None:
        """Stop the feed, let the learner train what is left, stop all but Redis, and count."""
        print("no more kills; training what is left", flush=True)
        await self._watch_until(lambda: all(part.is_up for part in self.kept_up.values()), START_S)
        feed = self.kept_up.pop("feed")
        if feed.child is not None and feed.is_up:
            feed.child.process.terminate()
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            self._poll()
            stat = await self.queue.stat()
            untrained = stat.queued - stat.delivered
            if stat.pending_prompts + stat.in_flight == 0 and untrained < self.config.replay.groups_per_step:
                break
            await asyncio.sleep(POLL_S)
        for name in ("learner", "rollout-0", "rollout-1"):
            part = self.kept_up.pop(name)
            if part.child is not None and part.is_up:
                part.child.process.terminate()
                await asyncio.to_thread(part.child.process.wait, 60)
        self.lineage.poll(time.monotonic())
        self.final = await self.queue.stat()
        submitted = sum(feed.position for feed in (await self.queue.feeds()).values())
        waiting = self.final.pending_prompts + self.final.in_flight + self.final.queued
        if SMOKE:
            followed = await self._followed()
            self.doubled, self.lost = doubled_in(followed)[0], submitted - waiting
        else:
            self.doubled, ledger = doubled_in(self.config.folder)
            self.lost = submitted - waiting - ledger
        self.observed.conservation_errors.append(self.final.conservation_error)

    async def _followed(self) -> Path:
        """The folder of a run that others have started, when it has ended. Its learner's log must be readable."""
        report_skipped("a run that trains", "it takes minutes; stand-ins were killed, and a run of others is read")
        run, deadline = followed_run(), time.monotonic() + FOLLOWED_S
        while not (run / "summary.json").exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"{run} has not ended after {FOLLOWED_S:.0f} s")
            await asyncio.sleep(POLL_S)
        lineage = Lineage(run / "logs" / "learner.log")
        lineage.begin_start(time.monotonic())
        lineage.poll(time.monotonic())
        missing = {*MARKERS, "first step"} - lineage.starts[0].phases.keys()
        if missing or not lineage.effective():
            raise SystemExit(f"{lineage.log} lacks the lines of {', '.join(sorted(missing)) or 'steps'}")
        return run

    # ── reporting ──

    def account(self) -> Account:
        return make_account(self.lineage, self.killer.faults, self.begun_at, self.ended_at or time.monotonic())

    def bars(self) -> list[Bar]:
        errors = self.observed.conservation_errors
        bars = [
            Bar("ETTR: effective steps · median step / wall time", self.account().ettr, 0.80),
            Bar("minutes in which conservation did not hold", sum(error != 0 for error in errors), 0, at_most=True),
            Bar("checks of conservation that Redis answered / made", self.observed.answered_share, 0.9),
            Bar(
                "unfinished prompts and groups, last quarter / first",
                growth(self.observed.unfinished),
                1.1,
                at_most=True,
            ),
            Bar("memory of all parts, last quarter / first", growth(totals(self.observed.rss)), 1.1, at_most=True),
            Bar(
                "memory of Redis beyond its lists, last quarter / second",
                growth(self.observed.redis_bytes, 1),
                1.1,
                at_most=True,
            ),
        ]
        if self.lost >= 0 or self.final is not None:
            bars += [
                Bar("prompts lost", abs(self.lost), 0, at_most=True),
                Bar("groups trained twice", abs(self.doubled), 0, at_most=True),
            ]
        return bars

    def save(self) -> bool:
        """Write the results so far. Returns whether every bar is met."""
        account, bars = self.account(), self.bars()
        calm = account.num_effective * self.calm_step_s / account.wall_s if account.wall_s else 0.0
        result = {
            "load": host_description(),
            "minutes": round(account.wall_s / 60, 1),
            "seed": self.seed,
            "is_complete": self.final is not None,
            "bars": [asdict(bar) | {"ok": bar.ok} for bar in bars],
            "ettr_at_undisturbed_pace": calm,
            "ettr_by_measured_durations": account.measured_ettr,
            "undisturbed_step_s": self.calm_step_s,
            "account": asdict(account),
            "learner_start_medians_s": self.lineage.phase_medians(),
            "kills": Counter(f"{fault.part} {fault.signal}" for fault in self.killer.faults),
            "restarts": {name: part.restarts for name, part in self.parts.items()},
            "back_off_s": {name: part.waited_s for name, part in self.parts.items()},
            "unanswered_checks": self.observed.unanswered,
            "unfinished": self.observed.unfinished,
            "rss_mb": {name: [b // 2**20 for b in samples] for name, samples in self.observed.rss.items()},
            "redis_mb": [round(b / 2**20, 1) for b in self.observed.redis_bytes],
        }
        write_results("soak", result)
        return all(bar.ok for bar in bars)

    def print_report(self) -> None:
        account = self.account()
        print(
            f"\n{account.num_effective} effective steps · {account.median_step_s:.2f} s = {account.productive_s:.0f} s "
            f"of {account.wall_s:.0f} s; {account.num_repeated} steps were trained again; the rest:"
        )
        for cause, seconds in account.rest.items():
            print(f"  {seconds:8.1f} s  {seconds / account.wall_s:6.1%}  {cause}")
        print("learner start, medians:", {name: round(s, 1) for name, s in self.lineage.phase_medians().items()})
        for bar in self.bars():
            sign = "≤" if bar.at_most else "≥"
            print(f"{'ok' if bar.ok else 'NOT MET':8}{bar.name}: {bar.value:.3f} ({sign} {bar.goal:g})")

    def _print_progress(self) -> None:
        account = self.account()
        errors = self.observed.conservation_errors
        print(
            f"{account.wall_s:6.0f} s  {len(self.killer.faults)} kills  step {self.lineage.trained[-1].step}  "
            f"ETTR {account.ettr:.3f}  repeated {account.num_repeated}  "
            f"conservation {sum(error == 0 for error in errors)}/{len(errors)}  "
            f"memory {sum(part.rss_bytes() for part in self.parts.values()) / 2**20:.0f} MB",
            flush=True,
        )


def make_parts(folder: Path) -> tuple[RunConfig, dict[str, Part]]:
    """The run's config and its parts, in the order of their start."""
    redis_port, ray_port = free_port(), free_port()
    redis_config, url = write_config(folder / "redis", redis_port)
    key = folder / "cluster.key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    overrides = {
        "run_dir": str(folder), "weights.cluster_key_file": str(key),
        "learner.ray_address": f"127.0.0.1:{ray_port}", "gateway.port": str(free_port()),
    }  # fmt: skip
    config = load_config(CONFIG, [word for name, value in overrides.items() for word in (f"--{name}", value)])
    config = config.model_copy(update={"redis": config.redis.model_copy(update={"url": url})})
    config.folder.mkdir(parents=True, exist_ok=True)
    config_file = folder / "run.yaml"
    config_file.touch(mode=0o600)
    config_file.write_text(dump_config(config))
    environment = {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1", "RAY_DISABLE_IMPORT_WARNING": "1",
    }  # fmt: skip

    def penstock(name: str, module: str, *arguments: str, stop_timeout_s: float = 20) -> Part:
        command = [sys.executable, "-m", module, "--config", str(config_file), *arguments]
        return Part(name, command, environment, stop_timeout_s)

    ray = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={ray_port}", "--num-cpus=4", "--object-store-memory=268435456", "--include-dashboard=false",
        "--disable-usage-stats", f"--temp-dir={folder / 'ray'}",
    ]  # fmt: skip
    parts = [
        Part("redis", [find_redis_server(), str(redis_config)]),
        Part("ray", ray, environment),
        penstock("gateway", "penstock_services.gateway"),
        penstock("learner", "penstock_learner", stop_timeout_s=60),
        penstock("rollout-0", "penstock_rollout", "--server-id", "rollout-0"),
        penstock("rollout-1", "penstock_rollout", "--server-id", "rollout-1"),
        penstock("feed", "penstock.cli.commands.feed"),
    ]
    return config, {part.name: part for part in parts}


def port_of(part: Part) -> int:
    """The port of Redis or of Ray's head."""
    for word in part.command:
        if word.startswith("--port="):
            return int(word.removeprefix("--port="))
    lines = Path(part.command[1]).read_text().splitlines()
    return int(next(line for line in lines if line.startswith("port ")).split()[1])


def doubled_in(run: Path) -> tuple[int, int]:
    """The groups that the steps up to the newest checkpoint trained beyond its ledger, and the length of the ledger."""
    checkpoints = CheckpointStore(run / "checkpoints", 2).newest_first()
    assert checkpoints, "the run wrote no checkpoint"
    newest = read_state(checkpoints[0])
    ledger = len(Ledger(newest.ledger))
    lines = (run / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["step"] <= newest.step]
    assert [int(step["step"]) for step in steps] == list(range(1, newest.step + 1)), "steps are missing"
    return int(sum(step["num_sequences"] for step in steps)) // SAMPLES_PER_GROUP - ledger, ledger


def totals(samples: dict[str, list[int]]) -> list[int]:
    """The sum over all parts in each minute in which all were up."""
    return [sum(row) for row in zip(*samples.values(), strict=True) if all(row)]


def growth(samples: list[int], since: int = 0) -> float:
    """The median of the last quarter over that of an earlier one (0: the first). 1 with too few samples to tell.
    An earlier median of 0 counts as 1."""
    quarter = len(samples) // 4
    if not quarter:
        return 1.0
    return statistics.median(samples[-quarter:]) / max(statistics.median(samples[since * quarter :][:quarter]), 1)


def main() -> int:
    parser = make_parser()
    parser.add_argument("--minutes", type=float, default=sized(60.0, 0.08), help="time during which parts are killed")
    parser.add_argument("--seed", type=int, default=1, help="seed of the kills")
    parser.add_argument("--mean-kill-s", type=float, default=sized(30.0, 0.4), help="mean time between two kills")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS, help="the parts that are killed")
    parser.add_argument(
        "--calm-s", type=float, default=sized(60.0, 1.0), help="undisturbed training before the first kill"
    )
    parser.add_argument("--keep", action="store_true", help="keep the run's folder, with all logs")
    arguments = parser.parse_args()
    # Ray's sockets need a short path (107 bytes).
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"folder: {folder}", flush=True)
    soak = Soak(folder, arguments.minutes, arguments.seed, arguments.mean_kill_s, arguments.targets, arguments.calm_s)

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, task.cancel)
        await soak.run()

    os.environ.pop("RAY_ADDRESS", None)
    is_met = False
    try:
        asyncio.run(run())
    except asyncio.CancelledError:
        print("interrupted; everything was stopped")
    finally:
        if soak.begun_at:
            is_met = soak.save()
            soak.print_report()
        if arguments.keep or not (is_met or SMOKE):
            print(f"logs: {folder / 'logs'}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if (is_met or SMOKE) and soak.final is not None else 1


if __name__ == "__main__":
    raise SystemExit(main())
