"""`penstock simulate`: predict the idle time and staleness of a run by a discrete-event simulation, in which servers
lease and finish groups, admission limits them, and the learner trains.

| event     | what happens                                                                                   |
|-----------|------------------------------------------------------------------------------------------------|
| finish    | a group is ready; the learner may have a full batch; the slot leases another prompt, if admitted |
| trained   | the weights are updated; the gather begins, and the push too unless another one still runs     |
| gathered  | the learner begins its next batch, which was read in the meantime                              |
| published | servers serve the version after a pause; admission advances; the newest waiting version follows |
| fail, up  | a server's groups are lost; their prompts are leased again when the leases expire; it returns   |

The rules are those of the queue (penstock/replay/queue_types.py; groups are taken in order of admission or of arrival)
and of publication (a newer version replaces one whose push has not begun). No data is moved, so 10,000 servers take
seconds.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from penstock.cli.parser import Parser
from penstock.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    import numpy as np


def _option(text: str, default: Any = MISSING) -> Any:
    """A field that is an option of the command too."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class FleetModel:
    """A run as the simulation sees it: rollout servers, limits of the queue, and durations. All servers are alike.

    Durations are log-normal: a few groups take long. `max_tokens` bounds them in a real run, and `longest_group` here.
    A failure loses the groups that the server works on."""

    num_servers: int = _option("number of rollout servers")
    concurrent_groups: int = _option("prompts that one server works on at once")
    group_s: float = _option("mean seconds from the lease of a prompt to its finished group, on a full server")
    groups_per_step: int = _option("groups per step")
    max_staleness: int = _option("largest number of versions that a group may be old")
    train_s: float = _option("seconds of forward passes and update in one step")
    push_s: float = _option("seconds from an update until the servers serve it", 0.0)
    gather_s: float = _option("seconds of push_s in which training waits while a version is staged", 0.0)
    pause_s: float = _option("seconds that decoding pauses while a version is loaded", 0.0)
    group_variation: float = _option("standard deviation of group_s, divided by its mean", 0.5)
    longest_group: float = _option("longest group, as a multiple of the mean", 4.0)
    train_variation: float = 0.1
    """Standard deviation of a step's duration, divided by its mean."""
    stale_policy: Literal["wait", "drop", "correct"] = "correct"
    server_mtbf_s: float = _option("mean seconds between two failures of one server", math.inf)
    restart_s: float = _option("seconds until a failed server works again", 300.0)
    lease_ttl_s: float = _option("seconds until a failed server's prompts are leased again", 15.0)
    num_steps: int = _option("steps to simulate", 50)
    seed: int = _option("seed of the random durations", 1)

    @property
    def num_slots(self) -> int:
        return self.num_servers * self.concurrent_groups


_OPTIONS = {each.name: each for each in fields(FleetModel) if each.metadata}


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="penstock simulate",
        description="Predict a run's idle time and staleness. --run-dir takes the inputs from a run.",
    )
    for name, option in _OPTIONS.items():
        kind = int if option.type == "int" else float
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=option.metadata["help"])
    parser.add_argument("--stale-policy", choices=("wait", "drop", "correct"), help="replay.stale_policy of the run")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR",
        help="folder of a run: take inputs from its config.yaml and metrics.jsonl, and compare the result with them",
    )  # fmt: skip
    parser.add_argument(
        "--rollout-metrics", type=Path, metavar="FILE", help="saved /metrics of a rollout server, to read group_s from"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    model: dict[str, Any] = measured_model(args.run_dir) if args.run_dir else {}
    if args.rollout_metrics:
        model["group_s"] = episode_seconds(args.rollout_metrics)
    names = (*_OPTIONS, "stale_policy")
    model |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    required = [name for name, option in _OPTIONS.items() if option.default is MISSING]
    if missing := [f"--{name.replace('_', '-')}" for name in required if name not in model]:
        raise ConfigError(f"missing: {', '.join(missing)}; or give --run-dir, and --rollout-metrics for group_s")
    forecast = simulate(FleetModel(**model))
    measured = measured_outcome(args.run_dir) if args.run_dir else {}
    if args.json:
        print(json.dumps({"model": model, "forecast": forecast.numbers(), "measured": measured}, indent=2))
    else:
        _print(forecast, measured)
    return 0


def _print(forecast: Forecast, measured: dict[str, float]) -> None:
    print(f"{'':<22}{'predicted':>12}{'measured' if measured else '':>12}")
    for name, value in forecast.numbers().items():
        compared = f"{measured[name]:>12.3f}" if name in measured else ""
        print(f"{name:<22}{value:>12.3f}{compared}")


# ── what a finished run measured ──

WARM_UP_STEPS = 5
"""Number of first steps that are ignored: they load kernels and fill the queue."""
_EPISODE = re.compile(r"^penstock_rollout_episode_duration_seconds_(sum|count) (\S+)$", re.M)


def measured_model(folder: Path) -> dict[str, Any]:
    """Fields of a FleetModel: limits from the run's configuration, and durations that the learner measured."""
    from penstock.config.loading import load_config

    config = load_config(folder / "config.yaml")
    rows = _rows(folder)
    return {
        "num_servers": config.rollout.num_servers,
        "concurrent_groups": config.rollout.max_concurrent_groups,
        "groups_per_step": config.replay.groups_per_step,
        "max_staleness": config.replay.max_staleness,
        "stale_policy": config.replay.stale_policy,
        "lease_ttl_s": config.replay.lease_ttl_s,
        "train_s": _mean(rows, "forward_s") + _mean(rows, "update_s"),
        "gather_s": _mean(rows, "gather_s"),
        "push_s": _mean(rows, "gather_s"),
        "num_steps": max(100, len(rows)),
    }


def measured_outcome(folder: Path) -> dict[str, float]:
    rows = _rows(folder)
    return {
        "idle_share": sum(row["wait_s"] for row in rows) / sum(row["step_s"] for row in rows),
        "step_s": _mean(rows, "step_s"),
        "staleness_mean": _mean(rows, "staleness_mean"),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "mixed_version_ratio": _mean(rows, "mixed_version_ratio"),
    }


def episode_seconds(metrics_file: Path) -> float:
    """Mean seconds per group, from the saved /metrics of a rollout server."""
    found = {name: float(value) for name, value in _EPISODE.findall(metrics_file.read_text())}
    if not found.get("count"):
        raise ConfigError(
            f"{metrics_file} has no finished groups; save /metrics of a rollout server that has finished some"
        )
    return found["sum"] / found["count"]


def _rows(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the folder of a run that has trained") from error
    if len(rows) <= WARM_UP_STEPS:
        raise ConfigError(f"{path} has {len(rows)} steps; more than {WARM_UP_STEPS} are needed")
    return rows[WARM_UP_STEPS:]


def _mean(rows: list[dict[str, float]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


# ── the result ──


@dataclass(frozen=True)
class StepRecord:
    """One step of the simulated learner. Fields have the names of metrics.jsonl."""

    wait_s: float
    step_s: float
    staleness_mean: float
    staleness_max: float
    mixed_version_ratio: float


@dataclass(frozen=True)
class Forecast:
    """Result of a simulation. The first steps, in which the queue fills, do not count."""

    idle_share: float
    """Share of its time that the learner waits for groups."""
    step_s: float
    staleness_mean: float
    """Mean number of versions between the policy that sampled a token and the policy that trains on it."""
    staleness_max: float
    mixed_version_ratio: float
    busy_share: float
    groups_per_s: float
    num_lost: int
    num_expired: int
    steps: tuple[StepRecord, ...] = field(repr=False, default=())

    def numbers(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if name != "steps"}


# ── the simulation ──

DRAWS_AT_ONCE = 4096


def simulate(model: FleetModel) -> Forecast:
    """Simulate `model.num_steps` steps. Raises InvalidInput for a model that can never finish a step."""
    for name in ("num_servers", "concurrent_groups", "groups_per_step", "num_steps"):
        if getattr(model, name) < 1:
            raise InvalidInput(name, "must be at least 1")
    for name in ("group_s", "train_s"):
        if not getattr(model, name) > 0:
            raise InvalidInput(name, "must be above 0")
    if model.server_mtbf_s <= model.group_s:
        raise InvalidInput("server_mtbf_s", "must be longer than group_s, or no group would finish")
    return _Simulation(model).run()


def _durations(random: np.random.Generator, mean_s: float, variation: float, longest: float) -> Iterator[float]:
    """Log-normal durations with this mean and relative standard deviation, at most `longest` times the mean."""
    import numpy as np

    sigma = math.sqrt(math.log(1 + variation**2))
    mu = math.log(mean_s) - sigma**2 / 2
    while True:
        yield from np.minimum(random.lognormal(mu, sigma, DRAWS_AT_ONCE), mean_s * longest).tolist()


class _Versions:
    """The version that servers serve at each time, and its mean over a span of time."""

    def __init__(self) -> None:
        self.times = [0.0]
        self.versions = [0]
        self._integrals = [0.0]

    def publish(self, time_s: float, version: int) -> None:
        self._integrals.append(self._integral(time_s))
        self.times.append(time_s)
        self.versions.append(version)

    def at(self, time_s: float) -> int:
        return self.versions[bisect_right(self.times, time_s) - 1]

    def mean(self, start_s: float, end_s: float) -> float:
        if end_s <= start_s:
            return self.at(start_s)
        return (self._integral(end_s) - self._integral(start_s)) / (end_s - start_s)

    def _integral(self, time_s: float) -> float:
        index = bisect_right(self.times, time_s) - 1
        return self._integrals[index] + self.versions[index] * (time_s - self.times[index])


class _Simulation:
    """One simulation of a model. A group is identified by the number of its admission."""

    def __init__(self, model: FleetModel) -> None:
        import numpy as np

        random = np.random.default_rng(model.seed)
        self.model = model
        self.now = 0.0
        self.random = random
        self.group_s = _durations(random, model.group_s, model.group_variation, model.longest_group)
        self.train_s = _durations(random, model.train_s, model.train_variation, math.inf)
        self.versions = _Versions()
        self.events: list[tuple[float, int, str, int]] = []
        self.num_events = 0
        # Finishing times are in decoding time, which stops during a pause, so that a pause shifts all of them at once.
        self.running: list[tuple[float, int, int, int]] = []
        self.paused_s = 0.0
        self.slots = deque((server, 0) for _ in range(model.concurrent_groups) for server in range(model.num_servers))
        self.epochs = [0] * model.num_servers
        """Number of failures of each server. Entries with an older number belong to a failed life of the server."""
        self.groups_of: list[dict[int, float]] = [{} for _ in range(model.num_servers)]
        """Start time of each running group, by server."""
        self.returned: list[int] = []
        self.num_admitted = self.num_dropped = self.num_lost = self.room = 0
        self.busy_s = 0.0
        self.ready: list[tuple[int, float, float]] = []
        """Group, start and end of each ready group, as a heap in order of admission."""
        self.next_in_order = 0
        self.batch: list[tuple[float, float]] = []
        self.collecting = 1
        """Number of the step whose batch is being read."""
        self.is_training = False
        self.free_since = 0.0
        self.begun: StepRecord | None = None
        self.records: list[StepRecord] = []
        self.published_step = 0
        self.pushing: int | None = None
        self.offer: int | None = None

    def run(self) -> Forecast:
        for server in range(self.model.num_servers):
            self._fail_later(server)
        self._admit()
        self._lease()
        handlers = {
            "trained": self._trained, "gathered": self._gathered, "published": self._published,
            "fail": self._fail, "up": self._up, "expired": self._expired,
        }  # fmt: skip
        while len(self.records) < self.model.num_steps:
            finish_s = self.running[0][0] + self.paused_s if self.running else math.inf
            if self.events and self.events[0][0] <= finish_s:
                self.now, _, name, what = heapq.heappop(self.events)
                handlers[name](what)
            else:
                self.now = max(self.now, finish_s)  # a rounding error must not move time backwards
                self._finish(*heapq.heappop(self.running)[1:])
        return self._forecast()

    def _at(self, time_s: float, name: str, what: int = 0) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, name, what))

    # ── servers ──

    def _admit(self) -> None:
        from penstock.replay.queue_types import admission

        model, accepted = self.model, self.num_admitted - self.num_dropped
        self.room = admission(
            step=self.published_step, trained=accepted, queued=0, in_flight=0,
            max_staleness=model.max_staleness, groups_per_step=model.groups_per_step,
        ).room  # fmt: skip

    def _lease(self) -> None:
        """Fill free slots, first with prompts that were returned, then with as many new ones as admission allows."""
        while self.slots and (self.returned or self.room):
            server, epoch = self.slots.popleft()
            if epoch != self.epochs[server]:
                continue
            if self.returned:
                group = self.returned.pop()
            else:
                group = self.num_admitted
                self.num_admitted += 1
                self.room -= 1
            self.groups_of[server][group] = self.now
            heapq.heappush(self.running, (self.now - self.paused_s + next(self.group_s), group, server, epoch))

    def _finish(self, group: int, server: int, epoch: int) -> None:
        if epoch != self.epochs[server]:
            return
        started_s = self.groups_of[server].pop(group)
        self.busy_s += self.now - started_s
        self.slots.append((server, epoch))
        heapq.heappush(self.ready, (group, started_s, self.now))
        self._take()
        if self.room or self.returned:
            self._lease()

    def _fail(self, server: int) -> None:
        self.epochs[server] += 1
        for group, started_s in self.groups_of[server].items():
            self.busy_s += self.now - started_s
            self.num_lost += 1
            self._at(self.now + self.model.lease_ttl_s, "expired", group)
        self.groups_of[server] = {}
        self._at(self.now + self.model.restart_s, "up", server)

    def _fail_later(self, server: int) -> None:
        if math.isfinite(self.model.server_mtbf_s):
            self._at(self.now + self.random.exponential(self.model.server_mtbf_s), "fail", server)

    def _up(self, server: int) -> None:
        self.slots.extend((server, self.epochs[server]) for _ in range(self.model.concurrent_groups))
        self._fail_later(server)
        self._lease()

    def _expired(self, group: int) -> None:
        self.returned.append(group)
        self._lease()

    # ── the learner ──

    def _take(self) -> None:
        """Fill the batch that is being read, and begin its step if the learner is free."""
        model, version = self.model, self.collecting - 1
        while self.ready and len(self.batch) < model.groups_per_step:
            if model.stale_policy == "wait" and self.ready[0][0] != self.next_in_order:
                break
            _, started_s, ended_s = heapq.heappop(self.ready)
            self.next_in_order += 1
            if model.stale_policy == "drop" and version - self.versions.at(started_s) > model.max_staleness:
                self.num_dropped += 1
                self._admit()
            else:
                self.batch.append((started_s, ended_s))
        if len(self.batch) == model.groups_per_step and not self.is_training:
            self._begin()

    def _begin(self) -> None:
        version, at = self.collecting - 1, self.versions.at
        ages = [version - self.versions.mean(*span) for span in self.batch]
        mixed = sum(at(started_s) != at(ended_s) for started_s, ended_s in self.batch)
        oldest = max(version - at(started_s) for started_s, _ in self.batch)
        num_groups = len(self.batch)
        wait_s = self.now - self.free_since
        self.begun = StepRecord(wait_s, 0.0, sum(ages) / num_groups, float(oldest), mixed / num_groups)
        self.is_training = True
        self._at(self.now + next(self.train_s), "trained", self.collecting)
        self.batch = []
        self.collecting += 1
        self._take()

    def _trained(self, step: int) -> None:
        self.offer = step
        self._push()
        self._at(self.now + self.model.gather_s, "gathered")

    def _gathered(self, _: int) -> None:
        assert self.begun is not None
        self.records.append(replace(self.begun, step_s=self.now - self.free_since))
        self.is_training, self.free_since = False, self.now
        if len(self.batch) == self.model.groups_per_step:
            self._begin()

    def _push(self) -> None:
        """Push the newest version if no push is running. A version that was overtaken is never pushed."""
        if self.pushing is None and self.offer is not None:
            self.pushing, self.offer = self.offer, None
            self._at(self.now + max(self.model.push_s, self.model.gather_s), "published", self.pushing)

    def _published(self, step: int) -> None:
        self.paused_s += self.model.pause_s
        self.versions.publish(self.now, step)
        self.published_step, self.pushing = step, None
        self._push()
        self._admit()
        self._lease()

    def _forecast(self) -> Forecast:
        model = self.model
        kept = self.records[min(2 * (model.max_staleness + 1), len(self.records) // 2) :]
        total_s = sum(record.step_s for record in kept)

        def mean(name: str) -> float:
            return math.fsum(getattr(record, name) for record in kept) / len(kept)

        return Forecast(
            idle_share=sum(record.wait_s for record in kept) / total_s,
            step_s=total_s / len(kept),
            staleness_mean=mean("staleness_mean"),
            staleness_max=max(record.staleness_max for record in kept),
            mixed_version_ratio=mean("mixed_version_ratio"),
            busy_share=self.busy_s / (self.now * model.num_slots),
            groups_per_s=model.groups_per_step * len(kept) / total_s,
            num_lost=self.num_lost,
            num_expired=self.num_dropped,
            steps=tuple(self.records),
        )
