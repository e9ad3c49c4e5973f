"""The figures of bench/scale.py: what was counted in each phase, and the costs and bars that follow from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from harness import Bar, Measurement

Part = Literal["redis_s", "gateway_s", "learner_s", "servers_s"]
NAMES: dict[Part, str] = {"redis_s": "Redis", "gateway_s": "gateway", "learner_s": "learner"}
MAX_GROWTH = 1.1
"""How much more a thing may cost in the largest fleet than in the smallest."""


@dataclass(frozen=True)
class Costs:
    """CPU time of one phase, in seconds, and how long it took."""

    redis_s: float = 0.0
    gateway_s: float = 0.0
    learner_s: float = 0.0
    servers_s: float = 0.0
    """The processes that simulate the servers took it. If it comes near that of all cores, `wall_s` measures them."""
    wall_s: float = 1.0

    def minus(self, before: Costs) -> Costs:
        return Costs(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def rate(self, part: Part) -> float:
        return float(getattr(self, part)) / self.wall_s

    def beyond(self, idle: Costs, part: Part) -> float:
        """CPU time beyond what an idle run costs in the same time."""
        return float(getattr(self, part)) - idle.rate(part) * self.wall_s


@dataclass(frozen=True)
class Sample:
    """What one size of the fleet cost in one round."""

    idle: Costs
    waiting: Costs
    groups: Costs
    submissions: Costs
    silent: Costs
    calls: Costs
    pushes: Costs
    num_groups: int
    num_submissions: int
    num_calls: int
    num_pushes: int
    p99_s: Mapping[str, float] = field(default_factory=dict)
    """Wall time of each kind of call."""


P99_NAMES = {
    "lease": "admission (a lease)",
    "report": "membership (a report)",
    "submit": "submission (REST)",
    "generate": "generate call (REST)",
}


def measurements(
    rounds: Sequence[Sample], label: str, num_servers: int, base: Costs, slower: float
) -> list[Measurement]:
    """All measurements of one size. Costs of a second are those at the real intervals, which are `slower` times
    shorter."""

    def of(name: str, unit: str, values: list[float]) -> Measurement:
        return Measurement(f"{label}: {name}", unit, values)

    found: list[Measurement] = []
    for part in ("redis_s", "learner_s"):
        whose: str = NAMES[part]  # type: ignore[index]
        times = slower if part == "redis_s" else 1.0  # the learner looks at the fleet at its real interval
        found += [
            of(f"{whose}, CPU of a server", "µs/s",
               [times * 1e6 * (s.idle.rate(part) - base.rate(part)) / num_servers for s in rounds]),  # type: ignore[arg-type]
            of(f"{whose}, CPU of a group", "µs",
               [1e6 * s.groups.beyond(s.idle, part) / s.num_groups for s in rounds]),  # type: ignore[arg-type]
            of(f"{whose}, CPU of a push to a server", "µs",
               [1e6 * getattr(s.pushes, part) / s.num_pushes / num_servers for s in rounds]),
        ]  # fmt: skip
    found += [
        of("Redis, CPU of a server that waits", "µs/s",
           [slower * 1e6 * (s.waiting.rate("redis_s") - s.idle.rate("redis_s")) / num_servers for s in rounds]),
        of("gateway, CPU of a submission", "µs",
           [1e6 * s.submissions.beyond(s.idle, "gateway_s") / s.num_submissions for s in rounds]),
        of("gateway, CPU of a generate call", "µs",
           [1e6 * s.calls.beyond(s.silent, "gateway_s") / s.num_calls for s in rounds]),
        of("Redis, CPU of a generate call", "µs",
           [1e6 * s.calls.beyond(s.silent, "redis_s") / s.num_calls for s in rounds]),
        of("groups", "groups/s", [s.num_groups / s.groups.wall_s for s in rounds]),
        of("a push without bytes, wall", "s", [s.pushes.wall_s / s.num_pushes for s in rounds]),
        of("a push without bytes, CPU of the simulated servers", "s",
           [s.pushes.servers_s / s.num_pushes for s in rounds]),
        of("groups, cores that the simulated servers take", "cores", [s.groups.rate("servers_s") for s in rounds]),
    ]  # fmt: skip
    found += [
        of(f"{call}, wall, p99", "ms", [1000 * s.p99_s[name] for s in rounds]) for name, call in P99_NAMES.items()
    ]
    return found


JUDGED = (
    *(f"Redis, CPU of {what}" for what in ("a group", "a server", "a push to a server")),
    *(f"learner, CPU of {what}" for what in ("a group", "a server", "a push to a server")),
    "gateway, CPU of a submission",
    "gateway, CPU of a generate call",
    "Redis, CPU of a generate call",
)  # fmt: skip


def growth(name: str, small: Measurement, large: Measurement) -> Bar:
    """How much more the same thing costs at the larger size. A cost that is not above zero is noise, of a machine that
    was too busy to measure it, and meets no bar."""
    value = large.median / small.median if small.median > 0 and large.median > 0 else math.inf
    return Bar(name, value, MAX_GROWTH, at_most=True)


def fleet_bars(found: Sequence[Measurement], smallest: str, largest: str) -> list[Bar]:
    by_name = {each.name: each for each in found}
    return [
        growth(f"{name}, {largest} / {smallest}", by_name[f"{smallest}: {name}"], by_name[f"{largest}: {name}"])
        for name in JUDGED
    ]
