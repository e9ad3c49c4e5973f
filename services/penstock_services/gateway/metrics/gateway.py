"""All metrics of a gateway: those of its own requests and those of its run."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from penstock import __version__
from penstock.metrics import DiskGauges
from penstock_services.gateway.metrics.requests import Observation, RequestSeries
from penstock_services.gateway.metrics.run import RunCollector, RunFacts, RunSnapshot


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, facts: RunFacts) -> None:
        self.registry = registry
        self.requests = RequestSeries()
        registry.register(self.requests)
        info = Gauge("penstock_build_info", "Always 1.", ["placement", "version"], registry=registry)
        info.labels(facts.placement, __version__).set(1)
        self.disk = DiskGauges(registry)
        self.run = RunCollector(facts)
        registry.register(self.run)

    def observe(self, protocol: str) -> Observation:
        """A context manager that counts and times one request."""
        return Observation(self.requests, protocol)

    def render(self, snapshot: RunSnapshot | None) -> bytes:
        """Metrics in the Prometheus text format. Without a snapshot the run's series are absent instead of stale."""
        self.run.snapshot = snapshot
        return generate_latest(self.registry)
