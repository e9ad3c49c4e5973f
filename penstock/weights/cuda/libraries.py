"""CuPy's bindings of NCCL and the CUDA runtime, imported on first use. Tests replace them by stand-ins."""

from __future__ import annotations

from typing import Any

from penstock.errors import WeightPushFailed

_MISSING = "CuPy cannot be imported ({}); install cupy-cuda13x, or set weights.transport to gloo"


def runtime() -> Any:
    """Return the module `cupy.cuda.runtime`."""
    try:
        from cupy.cuda import runtime as found
    except ImportError as error:
        raise WeightPushFailed(_MISSING.format(error)) from error
    return found


def nccl() -> Any:
    """Return the module `cupy.cuda.nccl`."""
    try:
        from cupy.cuda import nccl as found
    except ImportError as error:
        raise WeightPushFailed(_MISSING.format(error)) from error
    if not found.available:
        raise WeightPushFailed("CuPy cannot find NCCL; install nvidia-nccl-cu13, or set weights.transport to gloo")
    return found
