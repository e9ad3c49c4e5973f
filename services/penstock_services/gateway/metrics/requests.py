"""Metrics of the requests that a gateway answers."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from typing import Self

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.metrics import SHORT_SECONDS

_EDGES = (*map(str, SHORT_SECONDS), "+Inf")


class RequestSeries(Collector):
    """Counters of requests, without the locks of prometheus_client's counters, which would be most of their cost.

    Only the event loop may write and read them."""

    def __init__(self) -> None:
        self.inflight: defaultdict[str, int] = defaultdict(int)
        self.answered: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        """Number of answers by protocol, route and code."""
        self.durations: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (len(_EDGES) + 1))
        """Number of requests in each bucket, and last the sum of their durations, by protocol and route."""

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "penstock_gateway_requests", "Requests answered.", labels=["protocol", "route", "code"]
        )
        for answered, count in self.answered.items():
            requests.add_metric(answered, count)
        yield requests
        duration = HistogramMetricFamily(
            "penstock_gateway_request_duration_seconds", "Time to answer.", labels=["protocol", "route"]
        )
        for labels, (*counts, total) in self.durations.items():
            duration.add_metric(labels, list(zip(_EDGES, accumulate(counts), strict=True)), total)
        yield duration
        inflight = GaugeMetricFamily(
            "penstock_gateway_inflight_requests", "Requests being served.", labels=["protocol"]
        )
        for protocol, count in self.inflight.items():
            inflight.add_metric([protocol], count)
        yield inflight


class Observation:
    """Context manager of one request. Its route and code are set once they are known."""

    __slots__ = ("_protocol", "_series", "_started", "code", "route")

    def __init__(self, series: RequestSeries, protocol: str) -> None:
        self.route = "unmatched"
        """The route's template and not the path, so that there are few labels."""
        self.code = "INTERNAL"
        self._series = series
        self._protocol = protocol

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        self._series.inflight[self._protocol] += 1
        return self

    def __exit__(self, *_: object) -> None:
        series, protocol, took_s = self._series, self._protocol, time.perf_counter() - self._started
        series.inflight[protocol] -= 1
        series.answered[protocol, self.route, self.code] += 1
        durations = series.durations[protocol, self.route]
        durations[bisect_left(SHORT_SECONDS, took_s)] += 1
        durations[-1] += took_s
