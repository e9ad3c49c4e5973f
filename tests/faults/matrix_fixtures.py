"""Fixtures of the fault matrix: the state without faults, and runs that report what they measured.

Imports of the runs are inside the fixtures, because every test session loads this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from faults.matrix_run import FaultFree, MatrixRun

MakeRun = Callable[..., "MatrixRun"]


@pytest.fixture(scope="session")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> FaultFree:
    return _trained_once(tmp_path_factory, num_ranks=1)


@pytest.fixture(scope="session")
def fault_free_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> FaultFree:
    return _trained_once(tmp_path_factory, num_ranks=2)


def _trained_once(factory: pytest.TempPathFactory, num_ranks: int) -> FaultFree:
    """Train without faults, in one of the processes of pytest-xdist. The others wait for its result."""
    from faults.matrix_run import FaultFree, run_without_faults

    own = factory.getbasetemp()
    shared = own.parent if own.name.startswith("popen-") else own
    found = shared / f"fault-free-{num_ranks}.json"
    with FileLock(str(found) + ".lock", timeout=600):
        if not found.exists():
            trained = run_without_faults(factory.mktemp("fault-free"), num_ranks)
            found.write_text(json.dumps(trained.state_hashes))
    return FaultFree({int(step): value for step, value in json.loads(found.read_text()).items()})


@pytest.fixture
def make_run(tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[MakeRun]:
    """Makes the run of a test. Its measurements become the test's row of the matrix."""
    from faults.matrix_run import MatrixRun

    runs: list[MatrixRun] = []
    with ExitStack() as ending:

        def make(**options: Any) -> MatrixRun:
            runs.append(ending.enter_context(MatrixRun(tmp_path / f"run-{len(runs)}", **options)))
            return runs[-1]

        yield make
    for run in runs:
        measured = asdict(run.measured)
        for row in run.rows or [{}]:
            record_property("fault", measured | row)
