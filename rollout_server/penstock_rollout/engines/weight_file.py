"""Verified weights as a model folder in memory, for an engine in another process that loads from files."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from penstock.errors import WeightPushFailed
from penstock_rollout.weights.stage import TORCH_DTYPES

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ALIGNMENT = 8


class WeightFile:
    """`folder` holds `model.safetensors`, a link to anonymous memory of this process.

    So the memory is no file on a volume, is not bound by the size of /dev/shm (64 MiB in a container), can be opened by
    processes of this user only, and is gone when this process is."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd

    @classmethod
    def write(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightFile:
        """Copies the tensors. Raises WeightPushFailed when there is no room for them."""
        fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        file = cls(Path(tempfile.mkdtemp(prefix="penstock-weights-")), fd)
        try:
            (file.folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            _write_safetensors(fd, list(tensors))
        except OSError as error:
            file.remove()
            raise WeightPushFailed(f"no room for the weights in this server's memory: {error.strerror}") from error
        return file

    def remove(self) -> None:
        """The memory is freed once no process maps it."""
        os.close(self._fd)
        shutil.rmtree(self.folder, ignore_errors=True)


def _write_safetensors(fd: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
    described: dict[str, object] = {}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        described[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    _write(fd, memoryview(struct.pack("<Q", len(header)) + header))
    for _, tensor in tensors:
        _write(fd, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write(fd: int, data: memoryview) -> None:
    """One call writes 2 GiB at most."""
    while data:
        data = data[os.write(fd, data) :]
