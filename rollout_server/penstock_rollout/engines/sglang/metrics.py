"""SGLang's own metrics on the rollout server's /metrics."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SCRAPE_TIMEOUT_S = 2.0
PREFIX = "sglang:"


class SglangMetrics(Collector):
    """Fetches SGLang's metrics on each scrape, in the thread that serves /metrics. Yields none while SGLang is down."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def describe(self) -> list[Metric]:
        """Return nothing. Otherwise registering would call `collect` before the server runs."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            response = httpx.get(self._url, timeout=SCRAPE_TIMEOUT_S, follow_redirects=True, trust_env=False)
            response.raise_for_status()
        except httpx.HTTPError:
            return
        for family in text_string_to_metric_families(response.text):
            if family.name.startswith(PREFIX):
                yield family
