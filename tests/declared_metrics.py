"""Names of all metrics that the processes declare."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.sessions.task_store import TaskStat
from penstock.store.redis_memory import RedisMemory
from penstock_services.gateway.metrics.gateway import GatewayMetrics
from penstock_services.gateway.metrics.run import RunSnapshot
from run_facts import run_facts

ROOT = Path(__file__).parents[1]
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
