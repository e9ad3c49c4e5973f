"""Panels of a dashboard as data, and short forms for the common ones. make_dashboards.py turns them into JSON."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "[$__rate_interval]"


@dataclass(frozen=True)
class Query:
    expr: str
    """PromQL over `penstock_` metrics, without the label of the run, which `make_dashboards.py` adds. The expression
    must return something for a healthy run: a series that exists only after a fault ends in `or vector(0)`."""
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    """Description that Grafana shows in the panel's corner."""
    queries: tuple[Query, ...]
    unit: str = "short"
    is_number: bool = False
    """Shows one large number instead of lines."""


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    sections: tuple[Section, ...]


def lines(title: str, about: str, *queries: tuple[str, str], unit: str = "short") -> Panel:
    """One line for each series of the queries, which are pairs of expression and legend."""
    return Panel(title, about, tuple(Query(*query) for query in queries), unit)


def number(title: str, about: str, expr: str, unit: str = "short") -> Panel:
    """The newest value of the expression, large."""
    return Panel(title, about, (Query(expr),), unit, is_number=True)


def rate(metric: str, by: str = "") -> str:
    """PromQL: increase per second of a counter, summed over all series or by labels."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{WINDOW}))"


def quantile(share: float, histogram: str, by: str = "") -> str:
    """PromQL: quantile of a histogram over the panel's rate window."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{WINDOW})))"


def mean(histogram: str) -> str:
    """PromQL: mean of a histogram over the panel's rate window."""
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def spread(title: str, about: str, histogram: str, unit: str = "s") -> Panel:
    """Median and 95th percentile of a histogram."""
    return lines(title, about, (quantile(0.5, histogram), "p50"), (quantile(0.95, histogram), "p95"), unit=unit)
