"""All metrics of a gateway: those of its own requests and those of its run."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from penstock import __version__
from penstock.metrics import DiskGauges, HostMemoryGauges
from penstock_services.gateway.metrics.requests import Observation, RequestSeries
from penstock_services.gateway.metrics.run import RunCollector, RunSnapshot
from penstock_services.gateway.metrics.sessions import SessionCollector


class GatewayMetrics:
    def __init__(self, registry: CollectorRegistry, placement: str) -> None:
        self.registry = registry
        self.requests = RequestSeries()
        registry.register(self.requests)
        info = Gauge("penstock_build_info", "Always 1.", ["placement", "version"], registry=registry)
        info.labels(placement, __version__).set(1)
        self.disk = DiskGauges(registry)
        HostMemoryGauges(registry)
        self.keys = Gauge("penstock_gateway_api_keys", "API keys that are valid.", registry=registry)
        self.broken_key_files = Gauge(
            "penstock_gateway_broken_key_files", "Files of API keys that cannot be used.", registry=registry
        )
        self.sessions = SessionCollector()
        registry.register(self.sessions)
        self.run = RunCollector()
        registry.register(self.run)

    def observe(self, protocol: str) -> Observation:
        """A context manager that counts and times one request."""
        return Observation(self.requests, protocol)

    def set_keys(self, num_keys: int, num_broken_files: int) -> None:
        self.keys.set(num_keys)
        self.broken_key_files.set(num_broken_files)

    def render(self, snapshot: RunSnapshot | None) -> bytes:
        """Metrics in the Prometheus text format. Without a snapshot the run's series are absent instead of stale."""
        self.run.snapshot = snapshot
        return generate_latest(self.registry)
