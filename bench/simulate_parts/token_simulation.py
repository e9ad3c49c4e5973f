"""Discrete-event simulation of a run token by token, for samples whose lengths have a long tail.

`penstock simulate` computes a steady state from how long a group takes. Here the lengths of samples are drawn, and the
time follows from how many samples their server decodes at the moment: an engine with few samples left decodes each of
them faster. That matters most for synchronous training, which waits for the longest sample of a step on servers that
are nearly empty.

The samples of a group run on one server. A group is ready when its last sample is. The rule of admission is the
queue's own. As with `stale_policy: correct`, the learner takes groups in order of arrival, and a newer version replaces
one whose push has not begun.
With `max_staleness` 0 the run is synchronous: all prompts of a step are admitted when the weights of the step before
are published, and nothing else is generated until they are trained. Prefill is not simulated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import InvalidInput
from penstock.replay.queue_types import admission

DRAWS_AT_ONCE = 8192
SMALLEST_TOKENS = 1.0


@dataclass(frozen=True)
class TokenFleet:
    """A run as this simulation sees it. All servers are alike, and nothing fails."""

    num_servers: int
    samples_at_once: int
    """Samples that a server decodes at once."""
    step_s_of: Callable[[int], float]
    """Seconds in which an engine gives each of so many samples its next token."""
    mean_tokens: float
    """Mean number of tokens of a response before it is cut at `max_tokens`."""
    length_variation: float
    """Standard deviation of the lengths, divided by their mean, before they are cut. Lengths are log-normal. 0: all are
    equal."""
    max_tokens: float
    num_samples: int
    groups_per_step: int
    max_staleness: int
    train_s_of: Callable[[float], float]
    """Seconds of the forward passes and the update of a step with so many response tokens."""
    push_s: float = 0.0
    """Seconds from the end of an update until the servers serve it. The learner goes on meanwhile."""
    pause_s: float = 0.0
    """Seconds that decoding pauses while a version is loaded."""
    num_steps: int = 24
    seed: int = 1


@dataclass(frozen=True)
class TokenForecast:
    """Result of a simulation. The first steps, in which the queue fills, are skipped."""

    step_s: float
    tokens_per_s: float
    """Response tokens that were trained."""
    wait_share: float
    """Share of its time that the learner waits for groups."""
    decoding_share: float
    """Share of their time in which servers have at least one sample."""
    staleness_mean: float
    """Mean number of steps between the version that a group started with and the one that trains on it."""
    staleness_max: int


def simulate_tokens(fleet: TokenFleet) -> TokenForecast:
    """Simulate `fleet.num_steps` steps. Raises InvalidInput for a fleet that can never finish a step."""
    for name in ("num_servers", "samples_at_once", "num_samples", "groups_per_step", "num_steps"):
        if getattr(fleet, name) < 1:
            raise InvalidInput(name, "must be at least 1")
    if fleet.samples_at_once < fleet.num_samples:
        raise InvalidInput("samples_at_once", f"must be at least num_samples, {fleet.num_samples}")
    return _TokenSimulation(fleet).run()


def lengths(random: np.random.Generator, fleet: TokenFleet) -> Iterator[float]:
    """Tokens of one response after another."""
    sigma = math.sqrt(math.log(1 + fleet.length_variation**2))
    mu = math.log(fleet.mean_tokens) - sigma**2 / 2
    while True:
        drawn = random.lognormal(mu, sigma, DRAWS_AT_ONCE)
        yield from np.clip(drawn, SMALLEST_TOKENS, fleet.max_tokens).tolist()


@dataclass
class _Group:
    version: int
    """The version that its first tokens are sampled with."""
    num_left: int
    tokens: float = 0.0


@dataclass
class _Server:
    """An engine. All its samples advance at the same speed, so one number says how far each of them is."""

    at_s: float = 0.0
    """The time up to which `progress` is known. In the future during a pause."""
    progress: float = 0.0
    """Tokens that a sample would have if it had run since the beginning."""
    running: list[tuple[float, int]] = field(default_factory=list)
    """The progress at which each sample ends, and its group, as a heap."""
    decoding_s: float = 0.0
    epoch: int = 0
    """Number of the newest prediction of the server's next end. Events with an older one are void."""


class _TokenSimulation:
    def __init__(self, fleet: TokenFleet) -> None:
        self.fleet = fleet
        self.now = 0.0
        self.lengths = lengths(np.random.default_rng(fleet.seed), fleet)
        self.servers = [_Server() for _ in range(fleet.num_servers)]
        self.groups: dict[int, _Group] = {}
        self.num_admitted = 0
        self.events: list[tuple[float, int, str, int, int]] = []
        self.num_events = 0
        self.published = 0
        self.pushing: int | None = None
        self.offer: int | None = None
        self.ready: list[_Group] = []
        """Groups in order of their arrival."""
        self.step = 0
        """Steps that were begun."""
        self.is_training = False
        self.free_since = 0.0
        self.records: list[tuple[float, float, float, float, int]] = []
        """For each step that has ended: its end, the wait before it, its tokens, mean and largest staleness."""
        self.begun: tuple[float, float, float, int] = (0.0, 0.0, 0.0, 0)

    def run(self) -> TokenForecast:
        self._lease(range(len(self.servers)))
        while len(self.records) < self.fleet.num_steps:
            self.now, _, name, what, epoch = heapq.heappop(self.events)
            if name == "end":
                if epoch == self.servers[what].epoch:
                    self._end_samples(what)
            elif name == "trained":
                self._trained(what)
            else:
                self._publish(what)
        return self._forecast()

    def _at(self, time_s: float, name: str, what: int, epoch: int = 0) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, name, what, epoch))

    # ── servers ──

    def _advance(self, server: _Server) -> None:
        """Bring a server's progress to the present."""
        elapsed_s = self.now - server.at_s
        if elapsed_s <= 0:
            return
        if server.running:
            server.progress += elapsed_s / self.fleet.step_s_of(len(server.running))
            server.decoding_s += elapsed_s
        server.at_s = self.now

    def _predict(self, index: int) -> None:
        """Announce when the server's next sample ends if nothing changes before."""
        server = self.servers[index]
        server.epoch += 1
        if server.running:
            left = max(0.0, server.running[0][0] - server.progress)
            end_s = max(self.now, server.at_s) + left * self.fleet.step_s_of(len(server.running))
            self._at(end_s, "end", index, server.epoch)

    def _end_samples(self, index: int) -> None:
        server = self.servers[index]
        self._advance(server)
        ended = [heapq.heappop(server.running)[1]]  # the one that was announced, whatever rounding says
        while server.running and server.running[0][0] <= server.progress:
            ended.append(heapq.heappop(server.running)[1])
        num_ready = len(self.ready)
        for number in ended:
            group = self.groups[number]
            group.num_left -= 1
            if group.num_left == 0:
                self.ready.append(self.groups.pop(number))
        self._lease([index])  # if prompts may be admitted, all other servers are full
        self._predict(index)
        if len(self.ready) > num_ready:
            self._begin()

    def _lease(self, indices: Iterable[int]) -> None:
        """Give prompts that may be admitted to those of these servers that have room, the emptiest first."""
        fleet = self.fleet
        room = admission(
            step=self.published, trained=self.num_admitted, queued=0, in_flight=0,
            max_staleness=fleet.max_staleness, groups_per_step=fleet.groups_per_step,
        ).room  # fmt: skip
        if not room:
            return
        most = fleet.samples_at_once - fleet.num_samples
        free = [(size, index) for index in indices if (size := len(self.servers[index].running)) <= most]
        heapq.heapify(free)
        changed = set()
        while room and free:
            size, index = heapq.heappop(free)
            self._start(index)
            changed.add(index)
            room -= 1
            if size + fleet.num_samples <= most:
                heapq.heappush(free, (size + fleet.num_samples, index))
        for index in changed:
            self._predict(index)

    def _start(self, index: int) -> None:
        """Begin the samples of the next group."""
        server, number = self.servers[index], self.num_admitted
        self._advance(server)
        self.num_admitted += 1
        group = self.groups[number] = _Group(self.published, self.fleet.num_samples)
        for _ in range(self.fleet.num_samples):
            tokens = next(self.lengths)
            group.tokens += tokens
            heapq.heappush(server.running, (server.progress + tokens, number))

    # ── the learner ──

    def _begin(self) -> None:
        fleet = self.fleet
        if self.is_training or len(self.ready) < fleet.groups_per_step:
            return
        batch, self.ready = self.ready[: fleet.groups_per_step], self.ready[fleet.groups_per_step :]
        ages = [self.step - group.version for group in batch]
        tokens = sum(group.tokens for group in batch)
        self.begun = (self.now - self.free_since, tokens, sum(ages) / len(ages), max(ages))
        self.is_training = True
        self.step += 1
        self._at(self.now + fleet.train_s_of(tokens), "trained", self.step)

    def _trained(self, step: int) -> None:
        self.records.append((self.now, *self.begun))
        self.is_training, self.free_since = False, self.now
        self.offer = step
        self._push()
        self._begin()

    def _push(self) -> None:
        if self.pushing is None and self.offer is not None:
            self.pushing, self.offer = self.offer, None
            self._at(self.now + self.fleet.push_s, "published", self.pushing)

    def _publish(self, step: int) -> None:
        self.published, self.pushing = step, None
        self._push()
        if self.fleet.pause_s:
            for index, server in enumerate(self.servers):
                self._advance(server)
                server.at_s = max(server.at_s, self.now) + self.fleet.pause_s
                self._predict(index)
        self._lease(range(len(self.servers)))

    def _forecast(self) -> TokenForecast:
        first = min(2 * (self.fleet.max_staleness + 1), len(self.records) // 2)
        kept, begin_s = self.records[first:], self.records[first - 1][0] if first else 0.0
        total_s = kept[-1][0] - begin_s
        for server in self.servers:
            self._advance(server)
        decoding_s = sum(server.decoding_s for server in self.servers)
        return TokenForecast(
            step_s=total_s / len(kept),
            tokens_per_s=sum(record[2] for record in kept) / total_s,
            wait_share=sum(record[1] for record in kept) / total_s,
            decoding_share=decoding_s / (self.now * len(self.servers)),
            staleness_mean=sum(record[3] for record in kept) / len(kept),
            staleness_max=max(record[4] for record in kept),
        )
