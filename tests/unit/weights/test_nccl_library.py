"""NCCL as CuPy binds it: how it is found, its version, and its errors."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from penstock.errors import WeightPushFailed
from penstock.weights import cuda
from penstock.weights.cuda import NcclGroup
from penstock.weights.transports import Deadline
from support.cuda_stand_ins import NcclStandIn, install_nccl_stand_in


def test_without_cupy_there_is_one_line_and_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cupy")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cupy", None)
    for find in (cuda.nccl, cuda.runtime):
        with pytest.raises(WeightPushFailed, match="^CuPy cannot be imported .* install cupy-cuda13x, or set"):
            find()
    assert cuda.nccl_version() == ""


def test_without_nccl_there_is_one_line_and_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cupy.cuda.nccl")
    module.available = False  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "import_module", lambda name: module)
    with pytest.raises(WeightPushFailed, match="^CuPy cannot load NCCL; install nvidia-nccl-cu13, or set"):
        cuda.nccl()
    assert cuda.nccl_version() == ""


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> NcclStandIn:
    monkeypatch.setattr(cuda, "runtime", cuda.runtime)  # restored after the test
    monkeypatch.setattr(cuda, "nccl", cuda.nccl)
    return install_nccl_stand_in()


def test_the_version_has_three_parts(nccl: NcclStandIn) -> None:
    assert cuda.nccl_version() == "2.28.9"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            RuntimeError("NCCL_ERROR_SYSTEM_ERROR: no socket\nrun with NCCL_DEBUG"),
            "the NCCL group broke: NCCL_ERROR_SYSTEM_ERROR: no socket",
        ),
        (KeyError(7), "NCCL answered 7; unset NCCL_COMM_BLOCKING"),
    ],
    ids=["an error of NCCL", "a call that goes on in the background"],
)
def test_a_failed_start_is_one_line_and_aborted(nccl: NcclStandIn, raised: Exception, expected: str) -> None:
    """CuPy would destroy a communicator that was never made, which NCCL forbids."""
    is_aborted = []

    class Communicator:
        def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
            raise raised

        def abort(self) -> None:
            is_aborted.append(True)

    nccl.NcclCommunicator = Communicator
    group = NcclGroup(1, 0, 0)
    with pytest.raises(WeightPushFailed, match=f"^{expected}") as failure:
        group.open(Deadline(60, "a test"), lambda: b"")
    assert "\n" not in str(failure.value)
    group.abort()
    assert is_aborted == [True]
