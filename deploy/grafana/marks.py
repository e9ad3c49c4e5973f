"""Events that every dashboard marks. An event is a change between two points of the query, which are `$__interval`
apart."""

from __future__ import annotations

from panel import Mark


def _increases(counter: str, by: str) -> str:
    return f"max by ({by}) ({counter}) > max by ({by}) ({counter} offset $__interval)"


def _appears(series: str) -> str:
    """Series that exist, and did not exist one point earlier. `@` stands for the offset of the selector."""
    return f"{series.replace('@', '')} unless {series.replace('@', ' offset $__interval')}"


MARKS = (
    Mark(
        "Policy versions",
        _appears('count_values by (run) ("version", penstock_policy_version{component="learner"}@)'),
        "{{run}}: version {{version}}",
        "blue",
    ),
    Mark(
        "Restarts",
        _increases("penstock_component_restarts_total", "run, component"),
        "{{run}}: {{component}} was started again",
        "orange",
    ),
    Mark("Rewinds", _increases("penstock_rewinds_total", "run"), "{{run}} was rewound", "purple"),
    Mark("Pauses", "max by (run, who) (penstock_run_paused) == 1", "{{run}} is paused by the {{who}}", "yellow"),
    Mark("Alerts", 'max by (run, alertname) (ALERTS{alertstate="firing"})', "{{run}}: {{alertname}}", "red"),
    Mark(
        "Releases",
        _appears("max by (run, version) (penstock_build_info@)"),
        "{{run}}: Penstock {{version}}",
        "light-blue",
    ),
)
