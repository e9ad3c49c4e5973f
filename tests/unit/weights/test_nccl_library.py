"""The calls to NCCL's C library, made to a library with the same functions that checks what it is given."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.errors import WeightPushFailed
from penstock.weights import cuda
from penstock.weights.cuda import UNIQUE_ID_BYTES, NcclLibrary

SOURCE = r"""
#include <stddef.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned int magic; unsigned int version; int blocking; } ncclConfig_t;
static void *const COMM = (void *)0x7f0123456780;
static int num_polls, num_aborts;
int ncclGetVersion(int *version) { *version = 22809; return 0; }
int ncclGetUniqueId(ncclUniqueId *id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 2); return 0; }
int ncclCommInitRankConfig(void **comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config) {
    for (int i = 0; i < 128; i++) if (id.internal[i] != (char)(i * 2)) return 5;
    if (ranks != 3 || rank != 1) return 5;
    if (config->size != sizeof *config || config->magic != 0xcafebeef || config->version != 21400) return 4;
    if (config->blocking != 0) return 4;
    *comm = COMM;
    return 7;
}
int ncclCommGetAsyncError(void *comm, int *result) {
    if (comm != COMM) return 4;
    *result = num_polls++ == 0 ? 7 : num_aborts ? 6 : 0;
    return 0;
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *comm, void *stream) {
    int is_right = from == to && from == (void *)0x7f0000001000 && count == (size_t)5 << 32 && type == 1 && root == 0;
    return is_right && comm == COMM && stream == (void *)0x55 ? 7 : 4;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream) {
    int is_right = from == to && from == (void *)0x7f0000001000 && count == 3 && type == 1 && operation == 0;
    return is_right && comm == COMM && stream == (void *)0x55 ? 7 : 4;
}
int ncclCommAbort(void *comm) { num_aborts++; return comm == COMM ? 0 : 4; }
const char *ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "invalid argument"; }
"""


@pytest.fixture
def nccl(tmp_path: Path) -> NcclLibrary:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "nccl.c").write_text(SOURCE)
    library = tmp_path / "libnccl.so.2"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "nccl.c"], check=True, timeout=60)
    return NcclLibrary(ctypes.CDLL(str(library)))


def test_every_call_passes_what_nccl_expects(nccl: NcclLibrary) -> None:
    assert nccl.version() == "2.28.9"
    unique_id = nccl.unique_id()
    assert len(unique_id) == UNIQUE_ID_BYTES
    communicator = nccl.begin(3, unique_id, 1)
    assert [nccl.is_idle(communicator) for _ in range(2)] == [False, True]
    nccl.broadcast(communicator, 0x7F0000001000, 5 << 32, 0, 0x55)
    nccl.all_reduce(communicator, 0x7F0000001000, 3, 0x55)
    nccl.abort(communicator)
    with pytest.raises(WeightPushFailed, match=r"^NCCL failed: remote process exited \(result 6\)$"):
        nccl.is_idle(communicator)


def test_a_refused_call_says_why(nccl: NcclLibrary) -> None:
    with pytest.raises(WeightPushFailed, match="invalid argument"):
        nccl.begin(2, nccl.unique_id(), 1)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda, "_path_in_package", lambda: str(tmp_path / "libnccl.so.2"))
    with pytest.raises(WeightPushFailed, match="NCCL cannot be loaded .* install nvidia-nccl-cu13"):
        cuda.nccl.__wrapped__()
