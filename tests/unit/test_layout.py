"""The structure of the code, beyond what import-linter's contracts in pyproject.toml check."""

from __future__ import annotations

from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

PACKAGES = ("penstock", "penstock_rollout", "penstock_learner", "penstock_services", "penstock_tools")


def test_no_two_files_import_each_other() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    files = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(files) > 300
    TopologicalSorter(files).prepare()  # raises CycleError, which names the circle


def test_no_two_files_of_tests_have_one_name() -> None:
    """Otherwise pytest imports one of them, and cannot import the other."""
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
