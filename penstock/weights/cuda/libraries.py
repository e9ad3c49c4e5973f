"""CuPy's bindings of the CUDA runtime, and NCCL, loaded on first use. Tests replace them by stand-ins."""

from __future__ import annotations

from functools import cache
from typing import Any

from penstock.errors import WeightPushFailed
from penstock.weights.cuda.nccl_library import NcclLibrary, find_nccl

_MISSING = "CuPy cannot be imported ({}); install cupy-cuda13x, or set weights.transport to gloo"


def runtime() -> Any:
    """Return the module `cupy.cuda.runtime`."""
    try:
        from cupy.cuda import runtime as found
    except ImportError as error:
        raise WeightPushFailed(_MISSING.format(error)) from error
    return found


@cache
def nccl() -> NcclLibrary:
    """Return NCCL."""
    return find_nccl()


def nccl_version() -> str:
    """Return the version of NCCL, or an empty string if it cannot be loaded."""
    try:
        return nccl().version()
    except WeightPushFailed:
        return ""
