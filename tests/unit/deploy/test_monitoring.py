"""Dashboards and alerts are what the generator writes, and query only metrics that the code declares."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from penstock.replay.contract import QueueStat
from penstock_services.gateway.metrics.gateway import GatewayMetrics
from penstock_services.gateway.metrics.run import RunLimits, RunSnapshot

DEPLOY = Path(__file__).parents[3] / "deploy"


def declared_names() -> set[str]:
    from penstock_learner.metrics import LearnerMetrics
    from penstock_rollout.metrics import RolloutMetrics

    names: set[str] = set()
    gateway_registry = CollectorRegistry()
    gateway = GatewayMetrics(gateway_registry, RunLimits())
    gateway.run.snapshot = RunSnapshot(QueueStat(*[0] * len(QueueStat.__dataclass_fields__)), {"test": 1})
    registries = [
        gateway_registry,
        LearnerMetrics(CollectorRegistry(), "standalone").registry,
        RolloutMetrics(CollectorRegistry()).registry,
    ]
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    for registry in registries:
        for family in registry.collect():
            names.update(family.name + suffix for suffix in suffixes[family.type])
    return names


DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def panels(dashboard: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(dashboard.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def expressions(dashboard: Path) -> list[str]:
    return [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"penstock_\w+", expression))


def test_dashboards_are_those_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DEPLOY / "grafana"))
    made = runpy.run_path(str(DEPLOY / "grafana" / "make_dashboards.py"))
    built = {f"{board.name}.json": made["build"](board) for board in made["BOARDS"]}
    written = {path.name: path.read_text() for path in DASHBOARDS}
    assert written == built, "run: python deploy/grafana/make_dashboards.py"
    assert len(built) == 4


def test_dashboards_ask_only_for_metrics_that_the_code_declares() -> None:
    known = declared_names()
    for dashboard in DASHBOARDS:
        asked = set().union(*map(names_in, expressions(dashboard)))
        assert asked and asked <= known, sorted(asked - known)


def test_every_metric_is_on_a_dashboard() -> None:
    asked = {name for dashboard in DASHBOARDS for text in expressions(dashboard) for name in names_in(text)}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in asked}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in declared_names()} == shown


def test_panels_have_ids_and_a_data_source_variable() -> None:
    for path in DASHBOARDS:
        dashboard = json.loads(path.read_text())
        assert "__inputs" not in dashboard
        assert [v["type"] for v in dashboard["templating"]["list"]][0] == "datasource"
        ids = [panel["id"] for panel in dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in panels(path):
            assert panel["datasource"]["uid"] == "${datasource}"
            ref_ids = [target["refId"] for target in panel["targets"]]
            assert ref_ids and len(set(ref_ids)) == len(ref_ids)


ALERTS = DEPLOY / "prometheus" / "alerts.yml"
CASES = Path(__file__).parents[2] / "prometheus" / "alerts_test.yml"
CRITICAL = {
    "LearnerStalled", "PolicyVersionSkew", "WeightSyncFailing", "RolloutServersDown", "NonFiniteSteps",
    "CheckpointStale", "ComponentHeartbeatLost", "ConservationBroken", "LeasingPaused", "ServerQuarantined",
    "DiskNearlyFull",
}  # fmt: skip
WARNING = {
    "LearnerStarved", "RolloutBackpressured", "StalenessNearLimit", "DropsHigh", "QueueOld", "EntropyCollapse",
    "KLDivergence", "TrainInferMismatch", "GatewayErrors", "GatewayKeysBroken", "RewardErrors",
}  # fmt: skip
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; install prometheus")


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def test_alerts_ask_only_for_metrics_that_the_code_declares() -> None:
    for rule in alert_rules():
        assert names_in(rule["expr"]) and names_in(rule["expr"]) <= declared_names(), rule["alert"]


def test_alerts_have_a_severity_a_runbook_and_a_case_each_way() -> None:
    by_severity = {severity: set() for severity in ("critical", "warning")}
    headings = re.findall(r"^## (\w+)$", (DEPLOY.parent / "docs" / "runbooks.md").read_text(), re.M)
    for rule in alert_rules():
        by_severity[rule["labels"]["severity"]].add(rule["alert"])
        assert rule["annotations"]["runbook"] == f"docs/runbooks.md#{rule['alert'].lower()}"
    assert by_severity == {"critical": CRITICAL, "warning": WARNING}
    assert sorted(headings) == sorted(CRITICAL | WARNING)
    tested = [test for case in yaml.safe_load(CASES.read_text())["tests"] for test in case["alert_rule_test"]]
    assert {test["alertname"] for test in tested if test["exp_alerts"]} == CRITICAL | WARNING
    assert {test["alertname"] for test in tested if not test["exp_alerts"]} == CRITICAL | WARNING


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [("check", "rules", ALERTS), ("test", "rules", CASES), ("check", "config", ALERTS.parent / "prometheus.yml")],
    ids=lambda words: " ".join(words[:2]),
)  # fmt: skip
def test_promtool_accepts_rules_cases_and_configuration(words: tuple[Any, ...]) -> None:
    result = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
