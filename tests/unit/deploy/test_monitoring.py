"""Alerts query only metrics that the code declares, and each has tested cases and a runbook that a gateway serves."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
import yaml

from penstock.config.loading import load_overrides
from penstock_services.gateway.openapi import PageHandlers
from penstock_services.gateway.rest import HttpRequest
from support.monitoring import DEPLOY, declared_names, names_in

ALERTS = DEPLOY / "prometheus" / "alerts.yml"
RUNBOOKS = "http://127.0.0.1:8080/console/runbooks.html"
CASES = Path(__file__).parents[2] / "prometheus" / "alerts_test.yml"
CRITICAL = {
    "LearnerStalled", "PolicyVersionSkew", "WeightSyncFailing", "RolloutServersDown", "NonFiniteSteps",
    "CheckpointStale", "CheckpointUploadFailing", "ComponentHeartbeatLost", "ConservationBroken", "LeasingPaused",
    "ServerQuarantined", "DiskNearlyFull", "RunPausedItself", "RedisUnreachable",
}  # fmt: skip
WARNING = {
    "LearnerStarved", "RolloutBackpressured", "StalenessNearLimit", "DropsHigh", "QueueOld", "EntropyCollapse",
    "KLDivergence", "TrainInferMismatch", "GatewayErrors", "GatewayKeysBroken", "RewardErrors", "TargetDown",
    "RedisMemoryRunsOut", "HostMemoryRunsOut", "DiskRunsOut",
}  # fmt: skip
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; install prometheus")


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_alerts_ask_only_for_metrics_that_the_code_declares() -> None:
    for rule in alert_rules():
        assert "up{" in rule["expr"] or names_in(rule["expr"]), rule["alert"]
        assert names_in(rule["expr"]) <= declared_names(), rule["alert"]


def test_alerts_have_a_severity_a_runbook_and_a_case_each_way() -> None:
    by_severity = {severity: set() for severity in ("critical", "warning")}
    headings = re.findall(r"^## (\w+)$", (DEPLOY.parent / "docs" / "runbooks.md").read_text(), re.M)
    for rule in alert_rules():
        by_severity[rule["labels"]["severity"]].add(rule["alert"])
        assert rule["annotations"]["runbook_url"] == f"{RUNBOOKS}#{rule['alert'].lower()}"
    assert by_severity == {"critical": CRITICAL, "warning": WARNING}
    assert sorted(headings) == sorted(CRITICAL | WARNING)
    tested = [test for case in yaml.safe_load(CASES.read_text())["tests"] for test in case["alert_rule_test"]]
    assert {test["alertname"] for test in tested if test["exp_alerts"]} == CRITICAL | WARNING
    assert {test["alertname"] for test in tested if not test["exp_alerts"]} == CRITICAL | WARNING


async def test_a_gateway_serves_the_runbook_that_each_alert_links_to() -> None:
    """Without a key, since an on-call engineer opens it from a message."""
    page = urlsplit(RUNBOOKS)
    request = HttpRequest({"type": "http", "path": page.path, "headers": []}, cast(Any, None))
    request.params = {"name": page.path.rpartition("/")[2]}
    answer = await PageHandlers(()).file(request)
    assert PageHandlers.file.operation.scope is None  # type: ignore[attr-defined]
    text = bytes(answer.body).decode()
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    for rule in alert_rules():
        anchor = rule["annotations"]["runbook_url"].partition("#")[2]
        assert f'<h2 id="{anchor}">{rule["alert"]}</h2>' in text
    linked = re.findall(r'<a href="([^"]*)"', text)
    assert linked and all(f'id="{link.removeprefix("#")}"' in text for link in linked)


def test_the_ports_that_are_documented_for_a_local_run_are_those_that_are_scraped() -> None:
    page = (DEPLOY.parent / "docs" / "observability.md").read_text()
    [words] = re.findall(r"`(--gateway\.port [^`]*)`", page)
    config = load_overrides({"run": "r", "model": {"path": "m"}}, words.split())
    ports = [config.gateway.port, config.rollout.metrics_port, config.learner.metrics_port]
    scraped = yaml.safe_load((ALERTS.parent / "local.yml").read_text())["scrape_configs"]
    assert [job["static_configs"][0]["targets"] for job in scraped] == [[f"127.0.0.1:{port}"] for port in ports]


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", ALERTS), ("test", "rules", CASES), ("check", "config", ALERTS.parent / "prometheus.yml"),
        ("check", "config", ALERTS.parent / "local.yml"),
    ],
    ids=lambda words: " ".join((*words[:2], Path(words[2]).stem)),
)  # fmt: skip
def test_promtool_accepts_rules_cases_and_configuration(words: tuple[Any, ...]) -> None:
    result = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
