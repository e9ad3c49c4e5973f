"""CuPy's bindings of the CUDA runtime, and NCCL, loaded on first use. Tests replace them by stand-ins.

CuPy's communicators are blocking, and a blocking start cannot be aborted: its thread would wait for a missing rank
forever. So the calls of a weight push go to NCCL's C library itself, with `blocking = 0` in its public configuration.
None of them waits for another rank.
"""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import WeightPushFailed

UNIQUE_ID_BYTES = 128
SUCCESS, IN_PROGRESS = 0, 7
"""The result codes ncclSuccess and ncclInProgress."""
_UINT8 = 1
_SUM = 0
_SONAME = "libnccl.so.2"


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as NCCL 2.14 defined it. Later versions accept it, and use their defaults for all other fields."""

    _fields_ = (("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int))


class NcclLibrary:
    """A communicator is a plain integer. One thread at a time may use it, but any thread may abort it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in {
            "ncclGetVersion": [POINTER(c_int)],
            "ncclGetUniqueId": [POINTER(_UniqueId)],
            "ncclCommInitRankConfig": [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)],
            "ncclCommGetAsyncError": [c_void_p, POINTER(c_int)],
            "ncclBroadcast": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
            "ncclAllReduce": [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p],
            "ncclCommAbort": [c_void_p],
        }.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
        library.ncclGetErrorString.argtypes, library.ncclGetErrorString.restype = [c_int], c_char_p

    def version(self) -> str:
        """Return the version, such as 2.28.9."""
        code = c_int()
        self._check(self._library.ncclGetVersion(byref(code)))
        return f"{code.value // 10_000}.{code.value // 100 % 100}.{code.value % 100}"

    def unique_id(self) -> bytes:
        """Return the id by which the ranks of a new communicator find each other."""
        unique_id = _UniqueId()
        self._check(self._library.ncclGetUniqueId(byref(unique_id)))
        return bytes(unique_id.internal)

    def begin(self, num_ranks: int, unique_id: bytes, rank: int) -> int:
        """Begin to create a communicator on this thread's device. It is ready when `is_idle` returns True."""
        communicator = c_void_p()
        given = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21_400, blocking=0)
        result = self._library.ncclCommInitRankConfig(byref(communicator), num_ranks, given, rank, byref(config))
        self._check(result)
        return communicator.value or 0

    def is_idle(self, communicator: int) -> bool:
        """Return whether all calls have returned; their work on a stream may go on. Raises asynchronous errors."""
        result = c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, byref(result)))
        self._check(result.value)
        return result.value == SUCCESS

    def broadcast(self, communicator: int, pointer: int, num_bytes: int, root: int, stream: int) -> None:
        """Enqueue a broadcast in place. The call may go on in the background until `is_idle` returns True."""
        self._check(self._library.ncclBroadcast(pointer, pointer, num_bytes, _UINT8, root, communicator, stream))

    def all_reduce(self, communicator: int, pointer: int, num_bytes: int, stream: int) -> None:
        """Enqueue a sum of bytes in place, which ends on no rank before every rank has begun it."""
        self._check(self._library.ncclAllReduce(pointer, pointer, num_bytes, _UINT8, _SUM, communicator, stream))

    def abort(self, communicator: int) -> None:
        """End everything that the communicator does, and free it. Call it once."""
        self._library.ncclCommAbort(communicator)

    def _check(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            text = self._library.ncclGetErrorString(result).decode(errors="replace")
            raise WeightPushFailed(f"NCCL failed: {text} (result {result})")


@cache
def nccl() -> NcclLibrary:
    """Load NCCL: the library of the Python package, which torch uses too, or else that of the system."""
    try:
        return NcclLibrary(ctypes.CDLL(_path_in_package() or _SONAME))
    except (OSError, AttributeError) as error:
        raise WeightPushFailed(
            f"NCCL cannot be loaded ({error}); install nvidia-nccl-cu13, or set weights.transport to gloo"
        ) from error


def _path_in_package() -> str:
    try:
        package = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    folders = package.submodule_search_locations if package else None
    paths = [Path(folder) / "lib" / _SONAME for folder in folders or []]
    return next((str(path) for path in paths if path.exists()), "")


def runtime() -> Any:
    """The module `cupy.cuda.runtime`."""
    try:
        from cupy.cuda import runtime as found
    except ImportError as error:
        advice = "install cupy-cuda13x, or set weights.transport to gloo"
        raise WeightPushFailed(f"CuPy cannot be imported ({error}); {advice}") from error
    return found


def nccl_version() -> str:
    """The version of NCCL, or an empty string if it cannot be loaded."""
    try:
        return nccl().version()
    except WeightPushFailed:
        return ""
