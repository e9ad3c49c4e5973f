"""Discrete-event simulation of a run: servers lease and finish groups, admission limits them, the learner trains.

| event     | what happens                                                                                   |
|-----------|------------------------------------------------------------------------------------------------|
| finish    | a group is ready; the learner may have a full batch; the slot leases another prompt, if admitted |
| trained   | the weights are updated; the gather begins, and the push too unless another one still runs     |
| gathered  | the learner begins its next batch, which was read in the meantime                              |
| published | servers serve the version after a pause; admission advances; the newest waiting version follows |
| fail, up  | a server's groups are lost; their prompts are leased again when the leases expire; it returns   |

The rules are those of the queue (penstock/replay/admission.py; groups are taken in order of admission or of arrival)
and of publication (a newer version replaces one whose push has not begun). No data is moved, so 10,000 servers take
seconds.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from penstock.errors import InvalidInput
from penstock.replay.admission import admission
from penstock_tools.sizing.fleet_model import FleetModel, Forecast, StepRecord

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


def _group_durations(random: np.random.Generator, model: FleetModel) -> Iterator[float]:
    sigma, mu = _log_normal(model.group_s, model.group_variation)
    longest_s = model.group_s * model.longest_group
    while True:
        yield from np.minimum(random.lognormal(mu, sigma, DRAWS_AT_ONCE), longest_s).tolist()


def _train_durations(random: np.random.Generator, model: FleetModel) -> Iterator[float]:
    sigma, mu = _log_normal(model.train_s, model.train_variation)
    while True:
        yield from random.lognormal(mu, sigma, DRAWS_AT_ONCE).tolist()


def _log_normal(mean: float, variation: float) -> tuple[float, float]:
    """Sigma and mu of the log-normal distribution with this mean and relative standard deviation."""
    sigma = math.sqrt(math.log(1 + variation**2))
    return sigma, math.log(mean) - sigma**2 / 2


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
        random = np.random.default_rng(model.seed)
        self.model = model
        self.now = 0.0
        self.random = random
        self.group_s = _group_durations(random, model)
        self.train_s = _train_durations(random, model)
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
        """Compute how many prompts may be admitted now."""
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
