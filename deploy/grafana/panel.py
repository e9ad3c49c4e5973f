"""Panels of a dashboard as data, and short forms for the common ones. make_dashboards.py turns them into JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

WINDOW = "[$window]"
"""Range of all rates: a variable of the dashboard. A step may take minutes, so Grafana's own `$__rate_interval`, which
follows the scrape interval, would show gaps between steps."""
NOT_IN_SIGHT_S = 7 * 86400
"""Longest time to exhaustion that is shown."""


@dataclass(frozen=True)
class Query:
    expr: str
    """PromQL, without the label of the run, which `make_dashboards.py` adds to every selector and aggregation. The
    expression must return something for a healthy run: a series that exists only after a fault is `or_zero`."""
    legend: str = ""
    """`make_dashboards.py` puts the run before it, unless it names the run itself."""


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    """Description that Grafana shows in the panel's corner."""
    queries: tuple[Query, ...]
    unit: str
    """Id of a unit of Grafana, or `suffix:` and a text."""
    look: Literal["lines", "number", "name", "bars"] = "lines"
    """Lines over time; the newest values, large; the names of the newest series; or the newest values as bars."""
    limits: Mapping[float, str] = field(default_factory=dict)
    """Color from a value on. Values below the lowest are green."""
    colors: Mapping[str, str] = field(default_factory=dict)
    """Color by the last word of a series' legend."""
    opens: tuple[str, ...] = ()
    """Panels with more detail, each as `board/title`."""
    alerts: tuple[str, ...] = ()
    """Alerts about the same thing. The panel links to their runbooks."""
    width: int = 8
    height: int = 8


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    sections: tuple[Section, ...]


@dataclass(frozen=True)
class Mark:
    """Events that all panels of a dashboard show as vertical lines, or as regions while the expression has a value."""

    name: str
    expr: str
    text: str
    color: str


def lines(
    title: str,
    about: str,
    *queries: tuple[str, str],
    unit: str,
    limits: Mapping[float, str] | None = None,
    opens: tuple[str, ...] = (),
    alerts: tuple[str, ...] = (),
) -> Panel:
    """One line for each series of the queries, which are pairs of expression and legend."""
    found = tuple(Query(*query) for query in queries)
    return Panel(title, about, found, unit, limits=limits or {}, opens=opens, alerts=alerts)


def rate(metric: str, by: str = "") -> str:
    """PromQL: increase per second of a counter, summed over all series or by labels."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{WINDOW}))"


def run_wide(expr: str, by: str = "") -> str:
    """PromQL: an expression over series that every gateway reports of the whole run. Replicas of a gateway report the
    same, so they must not be summed."""
    return f"max by ({by}) ({expr})" if by else f"max({expr})"


def or_zero(expr: str) -> str:
    """PromQL: 0 if no run has the expression."""
    return f"{expr} or on () vector(0)"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """PromQL: quantile of a histogram over the panel's window."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{WINDOW})))"


def mean(histogram: str, by: str = "") -> str:
    """PromQL: mean of a histogram over the panel's window."""
    return f"{rate(histogram + '_sum', by)} / {rate(histogram + '_count', by)}"


def spread(
    title: str, about: str, histogram: str, unit: str = "s", opens: tuple[str, ...] = (), alerts: tuple[str, ...] = ()
) -> Panel:
    """Median and 95th percentile of a histogram."""
    queries = ((quantile(0.5, histogram), "p50"), (quantile(0.95, histogram), "p95"))
    return lines(title, about, *queries, unit=unit, opens=opens, alerts=alerts)


SERVER = "run, instance"
"""Labels that every series of one rollout server has in common."""


def by_server(expr: str) -> str:
    """PromQL: add the label `server` to an expression that has the labels SERVER."""
    return f"({expr}) * on ({SERVER}) group_left (server) max by ({SERVER}, server) (penstock_rollout_info)"


def since(timestamp: str) -> str:
    """PromQL: seconds since a timestamp, for each run. Nothing before the event has happened for the first time."""
    return f"time() - (max by (run) ({timestamp}) > 0)"


def time_left(left: str, measured: str, sign: str) -> str:
    """PromQL: seconds until `left` is 0, at most NOT_IN_SIGHT_S. `sign` is `-` if `measured` falls when `left` does.

    Takes the slower of the trends of an hour and of the newest minutes, and none while `measured` is young: a process
    that starts uses a lot at once, and then no more."""
    long, short = f"{sign}deriv({measured}[1h])", f"{sign}deriv({measured}[10m])"
    trend = f"clamp_max({left} / clamp_min(({long} < {short}) or {short}, 1e-6), {NOT_IN_SIGHT_S})"
    return f"({trend} and {measured} offset 15m) or (0 * {measured} + {NOT_IN_SIGHT_S})"
