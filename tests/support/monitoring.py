"""Names of the declared metrics, a Prometheus that scrapes a live run, and a collector of traces."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as Metrics

from penstock.machine import free_port, wait_for_port
from penstock.sessions.task_store import TaskStat
from penstock.store.redis_client import RedisMemory
from penstock_services.gateway.metrics import GatewayMetrics, RunSnapshot
from support.processes import ROOT, until
from support.run_facts import run_facts

DEPLOY = ROOT / "deploy"
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def gateway_metrics() -> GatewayMetrics:
    """Return the metrics of a gateway that serves an empty run."""
    gateway = GatewayMetrics(CollectorRegistry(), "standalone")
    gateway.run.snapshot = RunSnapshot(run_facts(), {"test": 1}, redis_memory=RedisMemory(0, 0))
    gateway.sessions.stat = TaskStat(*[0] * len(TaskStat.__dataclass_fields__))
    return gateway


def declared_names() -> set[str]:
    from penstock_learner.metrics import LearnerMetrics
    from penstock_rollout.metrics import RolloutMetrics

    registries = [
        gateway_metrics().registry,
        LearnerMetrics(CollectorRegistry(), "standalone").registry,
        RolloutMetrics(CollectorRegistry()).registry,
    ]
    return {
        family.name + suffix
        for registry in registries
        for family in registry.collect()
        for suffix in _SUFFIXES[family.type]
    }


def run_wide_names() -> set[str]:
    """Metrics that every gateway reports of the whole run."""
    return {family.name + suffix for family in gateway_metrics().run.collect() for suffix in _SUFFIXES[family.type]}


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"penstock_\w+", expression))


Ask = Callable[[str], list[dict[str, Any]]]
"""Answers an expression with its series."""


class EngineSample(Metrics):
    """The metrics of a server with vLLM or SGLang, as recorded. The run itself uses the cheaper torch engine, which has
    no metrics of its own."""

    def __init__(self, engine: str) -> None:
        info = f'penstock_rollout_info{{server="{engine}",engine="{engine}"}} 1\n'
        self.text = (ROOT / "tests" / "prometheus" / f"{engine}.prom").read_text() + info

    def collect(self) -> Iterator[Metric]:
        yield from text_string_to_metric_families(self.text)


def serve_engine_samples() -> list[int]:
    """Serve the metrics of two servers, whose names have a colon. Returns the ports."""
    ports = []
    for engine in ("vllm", "sglang"):
        registry = CollectorRegistry()
        registry.register(EngineSample(engine))
        ports.append(start_http_server(0, "127.0.0.1", registry)[0].server_port)
    return ports


@contextmanager
def scraping(
    folder: Path, endpoint_of: Callable[[str], str], engine_ports: Sequence[int], runs: Sequence[str] = ("live",)
) -> Iterator[Ask]:
    """A real Prometheus with the shipped configuration, except for the targets and the scrape interval. `endpoint_of`
    gives host and port of a process, which is scraped once as that of each run. It ends with the context."""
    port = free_port()
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(ROOT / "deploy" / "prometheus" / "alerts.yml")]
    for job in config["scrape_configs"]:
        process = job["job_name"].removeprefix("penstock-")
        targets = [endpoint_of(process)]
        if process == "rollout":
            targets += [f"127.0.0.1:{engine}" for engine in engine_ports]
        for name in ("dns_sd_configs", "relabel_configs"):
            job.pop(name, None)
        job["static_configs"] = [{"targets": targets, "labels": {"run": run}} for run in runs]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process_handle = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        assert wait_for_port("127.0.0.1", port, timeout_s=120), (folder / "log").read_text()

        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=60) as response:
                    return bool(response.status == 200)
            except OSError:
                return False

        until(is_ready, "Prometheus to be ready")

        def ask(expression: str) -> list[dict[str, Any]]:
            query = urllib.parse.urlencode({"query": expression})
            url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
            with urllib.request.urlopen(url, timeout=120) as response:
                answer = json.load(response)
            assert answer["status"] == "success", answer
            result: list[dict[str, Any]] = answer["data"]["result"]
            return result

        yield ask
    finally:
        process_handle.kill()
        process_handle.wait()


def filled_in(expression: str, window: str = "20s") -> str:
    """The expression with Grafana's variables replaced."""
    return expression.replace("$window", window).replace("$run", ".*")


def dashboards() -> dict[str, dict[str, Any]]:
    paths = sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def expressions() -> list[tuple[str, str]]:
    """Panel and expression of every dashboard."""
    return [
        (f"{name}: {panel['title']}", filled_in(target["expr"]))
        for name, board in dashboards().items()
        for panel in board["panels"]
        for target in panel.get("targets", [])
    ]


class Collector(ThreadingHTTPServer):
    """Keeps every span that it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _CollectorHandler)
        self.spans: list[tuple[str, Span]] = []
        """Service and span, in the order of arrival."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            fields = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
            for scope in of_resource.scope_spans:
                self.server.spans += [(fields["service.name"], span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing to standard error."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def documented_metrics() -> list[tuple[str, str, str]]:
    """Name, type and process of every metric of docs/metrics.md. A section's title names its process."""
    found = []
    for section in (ROOT / "docs" / "metrics.md").read_text().split("\n## "):
        process = section.split()[0].rstrip(":").lower()
        rows = re.findall(r"^\| `(penstock_\w+)(?:\{[\w,]*\})?` \| (\w+) \|", section, re.MULTILINE)
        found += [(name, kind, process) for name, kind in rows]
    return found
