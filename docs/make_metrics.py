"""Write the tables of metrics.md: the metrics from their declarations, and verl's names from the loggers.

python docs/make_metrics.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from penstock_learner.loggers.step_loggers import SPREADS, VERL_NAMES
from penstock_learner.metrics import LearnerMetrics
from penstock_rollout.metrics import RolloutMetrics

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).parent / "metrics.md"
TABLE = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->\n)", re.DOTALL)
DIFFERENCES = {
    "kl_loss": "multiplied by its coefficient",
    "kl_coefficient": "in the reward too: verl's `actor/reward_kl_penalty_coeff`",
    "reward_*": "before a KL penalty in the reward",
    "truncated_ratio": "cut at any limit on tokens or turns",
    "memory_peak_gib": "of the policy's fullest rank; on a CPU, of its process",
    "host_memory_gib": "of the policy's fullest container",
    "mfu": "6 FLOPs per parameter and token, without attention",
    "importance_weight_max": "after truncation; before it: `penstock/importance_ratio_max`",
    "is_rejected_ratio": "tokens outside the band too",
    "wait_s": "time waiting for a batch; generation runs all the time",
    "update_s": "the critic's update runs in parallel",
    "gather_s": "the push itself overlaps the next step",
}
"""What a number means that verl's number of that name does not."""


def rows(collectors: Iterable[Any]) -> list[str]:
    """A row for each metric: its name as it is scraped, with labels, its type and its help text."""
    found = []
    for collector in collectors:
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ",".join(getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ()))
            name += f"{{{labels}}}" if labels else ""
            found.append(f"| `{name}` | {family.type} | {family.documentation.removesuffix('.')} |")
    return ["| name | type | meaning |", "|---|---|---|", *found]


def tables() -> dict[str, list[str]]:
    """The rows of every table by the name that its first comment has."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support.monitoring import gateway_metrics

    gateway = gateway_metrics()
    learner, rollout = CollectorRegistry(), CollectorRegistry()
    LearnerMetrics(learner, placement="standalone")
    RolloutMetrics(rollout)
    spreads = {f"{own}_{kind}" for own in SPREADS for kind in ("mean", "min", "max")}
    names = {own: verl for own, verl in VERL_NAMES.items() if own not in spreads}
    names |= {f"{own}_*": f"{verl}/*" for own, verl in SPREADS.items()}
    alike = [f"`{own}`: `{verl}`" for own, verl in names.items() if own not in DIFFERENCES]
    others = [f"| `{own}` | `{names[own]}` | {difference} |" for own, difference in DIFFERENCES.items()]
    return {
        "run": rows([gateway.run]),
        "gateway": rows(collector for collector in _collectors(gateway.registry) if collector is not gateway.run),
        "rollout": rows(_collectors(rollout)),
        "learner": rows(_collectors(learner)),
        "verl": [
            *textwrap.wrap(f"The same: {'; '.join(alike)}.", 140, break_on_hyphens=False),
            "",
            "| metrics.jsonl | verl | difference from verl |",
            "|---|---|---|",
            *others,
        ],
    }


def _collectors(registry: CollectorRegistry) -> list[Any]:
    return list(registry._collector_to_names)


def build() -> str:
    """The whole page, with its tables made again."""
    made = tables()

    def table(match: re.Match[str]) -> str:
        return match[1] + "\n".join(made.pop(match[2])) + "\n" + match[3]

    text = TABLE.sub(table, PAGE.read_text())
    assert not made, f"metrics.md has no table for {', '.join(made)}"
    return text


if __name__ == "__main__":
    PAGE.write_text(build())
