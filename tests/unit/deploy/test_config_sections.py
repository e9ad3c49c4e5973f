"""A pod restarts when a part of the configuration changes that its process reads, and only then."""

from __future__ import annotations

import re

import pytest
import yaml

from support.chart import CHART, REPLICAS, declare, further, needs_helm, of_kind, pod_templates, render
from support.config_readers import Name, paths_read_from

ENTRIES: dict[str, tuple[Name, ...]] = {
    "gateway": (("penstock_services.gateway.__main__", "main"),),
    "rollout": (("penstock_rollout.__main__", "main"),),
    "learner": (("penstock_learner.__main__", "main"),),
    "feed": (("penstock.cli.commands.feed", "main"),),
}
CHECKS = (("penstock_rollout.start_check", "check"), ("penstock_learner.start_check", "check"))
"""What `--check` reads is no reason for a restart."""
DECIDED_BY_CHART = {"run_dir", "cache_dir"}


@pytest.mark.parametrize("process", ENTRIES)
def test_the_declared_parts_are_those_that_the_code_reads(process: str) -> None:
    declared = yaml.safe_load((CHART / "files" / "config-sections.yaml").read_text())[process]
    found = paths_read_from(*ENTRIES[process], without=CHECKS)

    def covers(section: str, path: str) -> bool:
        return f"{path}.".startswith(f"{section}.")

    missing = {path: places for path, places in found.items()
               if path not in DECIDED_BY_CHART and not any(covers(section, path) for section in declared)}  # fmt: skip
    assert not missing, "read, but not declared"
    assert not [section for section in declared if not any(covers(section, path) for path in found)], "never read"
    nested = [(a, b) for a in declared for b in declared if a != b and covers(a, b)]
    assert not nested


def checksums(*arguments: str, values: str) -> dict[str, str]:
    """Checksum of each process, by its name."""
    return {
        template["spec"]["containers"][0]["name"]: template["metadata"]["annotations"]["checksum/config"]
        for _, template in pod_templates(render(*arguments, values=values))
        if "checksum/config" in template["metadata"].get("annotations", {})
    }


declare(("--set=config.learner.lr=1.0e-5",), ("--set=config.learner.num_steps=7",), values="no-gpu")
declare(("--set=config.run=run",), values="split-collocate")


@needs_helm
@pytest.mark.parametrize(
    ("setting", "restarted"),
    [
        ("config.learner.lr=1.0e-5", {"learner"}),
        ("config.learner.num_steps=7", {"learner", "gateway", "feed"}),
        (REPLICAS, set()),
        *further(
            ("config.rollout.max_concurrent_groups=5", {"rollout"}),
            ("config.gateway.requests_per_s=5", {"gateway"}),
            ("config.dataset.max_tokens=9", {"learner", "feed"}),
            ("config.seed=2", {"learner", "rollout", "feed"}),
            ("config.replay.max_staleness=1", {"learner", "rollout", "feed", "gateway"}),
        ),
    ],
)
def test_a_change_restarts_the_processes_that_read_it(setting: str, restarted: set[str]) -> None:
    before, after = checksums(values="no-gpu"), checksums(f"--set={setting}", values="no-gpu")
    assert before.keys() == after.keys() == {"gateway", "rollout", "learner", "feed"}
    assert {name for name in before if before[name] != after[name]} == restarted

    def jobs(*arguments: str) -> dict[str, str]:
        names = [job["metadata"]["name"] for job in of_kind(render(*arguments, values="no-gpu"), "Job")]
        return {re.sub(r"^test-penstock-(\w+)-[0-9a-f]{8}$", r"\1", name): name for name in names}

    renamed = {name for name, job in jobs(f"--set={setting}").items() if job != jobs()[name]}
    assert renamed == restarted & {"learner", "feed"}, "a Job cannot be changed, so a new config makes a new Job"


@needs_helm
def test_a_rollback_brings_back_the_old_pods() -> None:
    assert checksums(values="split-collocate") == checksums("--set=config.run=run", values="split-collocate")
    ray = [t for name, t in pod_templates(render(values="split-collocate")) if "-ray/" in name]
    assert ray and not [t for t in ray if "annotations" in t["metadata"]], "the driver gives the ranks their config"
