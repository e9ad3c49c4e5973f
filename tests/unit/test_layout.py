"""The structure of the code, beyond what import-linter's contracts in pyproject.toml check."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

PACKAGES = ("penstock", "penstock_rollout", "penstock_learner", "penstock_services")


def test_no_two_files_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    files = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(files) > 300
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle
