"""A Prometheus that scrapes a live run with the shipped configuration, and the expressions of the dashboards."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector as Metrics

from demo_process import ROOT
from penstock.machine.ports import free_port, wait_for_port
from waiting import until

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
def scraping(folder: Path, endpoint_of: Callable[[str], str], engine_ports: Sequence[int]) -> Iterator[Ask]:
    """A real Prometheus with the shipped configuration, except for the targets and the scrape interval. `endpoint_of`
    gives host and port of a process. It ends with the context."""
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
        job["static_configs"] = [{"targets": targets, "labels": {"run": "live"}}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process_handle = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        assert wait_for_port("127.0.0.1", port, timeout_s=30), (folder / "log").read_text()

        def is_ready() -> bool:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=20) as response:
                    return bool(response.status == 200)
            except urllib.error.HTTPError:
                return False

        until(is_ready, "Prometheus to be ready", timeout_s=60)

        def ask(expression: str) -> list[dict[str, Any]]:
            query = urllib.parse.urlencode({"query": expression})
            url = f"http://127.0.0.1:{port}/api/v1/query?{query}"
            with urllib.request.urlopen(url, timeout=20) as response:
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
