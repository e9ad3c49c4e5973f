"""Verified weights as a model folder in memory, from which SGLang's process loads them."""

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
    """A folder with one file, `model.safetensors`, which links to anonymous memory of this process.

    The weights are not written to a volume, and the size of /dev/shm (64 MiB in a container) does not limit them. Only
    processes of the same user can open the file. The file disappears when this process ends."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        self._fd = fd

    @classmethod
    def write(cls, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightFile:
        """Copy the tensors into a new file. Raises WeightPushFailed if there is not enough memory."""
        fd = os.memfd_create("penstock-weights", os.MFD_CLOEXEC)
        file = cls(Path(tempfile.mkdtemp(prefix="penstock-weights-")), fd)
        try:
            (file.folder / "model.safetensors").symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            _write_safetensors(fd, list(tensors))
        except OSError as error:
            file.remove()
            raise WeightPushFailed(f"not enough memory for a copy of the weights: {error.strerror}") from error
        return file

    def remove(self) -> None:
        """Remove the folder. The memory is freed when no process maps it any more."""
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
    """Write all bytes. One os.write call writes 2 GiB at most."""
    while data:
        data = data[os.write(fd, data) :]
