"""The facts of a run that trains, with changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from penstock.config.loading import validate
from penstock.diagnosis.facts import RunFacts
from penstock.replay.queue_types import QueueStat
from penstock.store.fleet import Orders, ServerRecord
from penstock.v1 import policies_pb2

STAT = QueueStat(**{field.name: 0 for field in fields(QueueStat)} | {"finished_step": -1, "term": 3})
SERVER = ServerRecord("s", "a:1", "vllm", "READY")


def run_facts(
    steps: Sequence[Mapping[str, float]] = (), sections: Mapping[str, Any] | None = None, **changes: Any
) -> RunFacts:
    """A run whose learner is alive and has a server.

    `steps` are metrics, oldest first; `sections` are those of its config."""
    config = validate({"model": {"path": "m"}, **(sections or {})}, "test")
    policies = [policies_pb2.Policy(metrics=step, step=number) for number, step in enumerate(steps, 1)][::-1]
    facts = RunFacts(
        config, STAT, Orders(term=3), servers=[SERVER], heartbeat_ages_s={"learner": 0.5}, policies=policies
    )
    return replace(facts, **changes)
