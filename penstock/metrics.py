"""Prometheus metrics of one process, and the file that says where the process listens."""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.machine import DiskWatch, measure_memory, written_whole

PREFIX = "penstock"
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Histogram buckets for the duration of a request or a call."""
LONG_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Histogram buckets for the duration of a group, a step, a checkpoint or a recovery."""


class DiskGauges:
    """Free space of the disks that a process uses, measured at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._free, self._needed, self._size = (
            Gauge(f"{PREFIX}_disk_{name}_bytes", text, ["folder"], registry=registry)
            for name, text in (
                ("free", "Free space on the disk of a folder."),
                ("needed", "Space that the next checkpoint and a reserve need."),
                ("size", "Size of the disk of a folder."),
            )
        )

    def follow(self, name: str, watch: DiskWatch) -> None:
        self._free.labels(name).set_function(lambda: watch.measure().free_bytes)
        self._needed.labels(name).set_function(lambda: watch.needed_bytes)
        self._size.labels(name).set_function(lambda: watch.measure().size_bytes)


class HostMemoryGauges(Collector):
    """Memory of the machine or container that a process runs in, measured at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        memory = measure_memory()
        if memory is None:
            return
        for name, text, value in (
            ("available", "Memory that the process's machine or container can still give.", memory.available_bytes),
            ("size", "Memory of the process's machine, or the limit of its container.", memory.size_bytes),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_host_memory_{name}_bytes", text, value=value)


class CountedHistogram(Collector):
    """A histogram that can observe many values in one call. prometheus_client's histogram takes one value per call,
    which would be most of the cost of all metrics. Only one thread may write to it."""

    def __init__(self, name: str, documentation: str, edges: Sequence[float], registry: CollectorRegistry) -> None:
        self.name = name
        self.documentation = documentation
        self.edges = tuple(edges)
        self._counts = [0.0] * (len(self.edges) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self.observe_all((value,))

    def observe_all(self, values: Sequence[float]) -> None:
        for value in values:
            self._counts[bisect_left(self.edges, value)] += 1
        self._sum += sum(values)

    def add(self, counts: Sequence[float], total: float) -> None:
        """Add values that are already counted by bucket: `counts[i]` of them were in (edges[i - 1], edges[i]], and the
        last count is of values above all edges."""
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        self._sum += total

    def collect(self) -> Iterator[Metric]:
        edges = (*map(str, map(float, self.edges)), "+Inf")
        buckets = list(zip(edges, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self.name, self.documentation, buckets=buckets, sum_value=self._sum)


def write_endpoint(folder: Path, component: str, **fields: object) -> None:
    """Write `folder/component.json`, atomically: where `component` listens, for other processes of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(folder / f"{component}.json") as partial:
        partial.write_text(json.dumps({"pid": os.getpid(), **fields}))
