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
    """Asks SGLang when it is scraped, from the thread that serves /metrics. A server that is down adds nothing."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/metrics"

    def describe(self) -> list[Metric]:
        """Nothing, so that registering does not ask a server that may not run yet."""
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
