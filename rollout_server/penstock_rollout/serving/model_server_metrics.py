"""Metrics in the names of the model server protocol, which endpoint pickers and routers of inference read.

The names are vLLM's, which has them by itself; this is for the other engines. There is no `vllm:lora_requests_info`: a
policy is served whole.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock_rollout.engines.engine import EngineStats

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "vllm:num_requests_running": ("Requests that the engine decodes.", lambda stats: stats.running_requests),
    "vllm:num_requests_waiting": ("Requests that wait for the engine.", lambda stats: stats.waiting_requests),
    "vllm:kv_cache_usage_perc": ("Used share of the KV cache, from 0 to 1.", lambda stats: stats.kv_cache_usage),
}


class ModelServerMetrics(Collector):
    """Asks the engine when it is scraped. `is_started` says whether it can be asked."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats], is_started: Callable[[], bool]) -> None:
        self.model_name = model_name
        self.stats = stats
        self.is_started = is_started

    def collect(self) -> list[GaugeMetricFamily]:
        stats = self.stats() if self.is_started() else EngineStats(0, 0, 0.0)
        families = []
        for name, (meaning, read) in _GAUGES.items():
            family = GaugeMetricFamily(name, meaning, labels=["model_name"])
            family.add_metric([self.model_name], read(stats))
            families.append(family)
        return families

    def describe(self) -> list[GaugeMetricFamily]:
        """Names only, so that registering does not ask the engine."""
        return [GaugeMetricFamily(name, meaning, labels=["model_name"]) for name, (meaning, _) in _GAUGES.items()]
