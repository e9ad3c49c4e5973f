"""The safetensors files of a model folder, read slice by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

PIECE_BYTES = 2**24
"""Most that is read at once of one tensor, if its rows are not longer."""
_MAPPED_BYTES = 2**25
"""Files are closed after this many bytes. Their pages, which are mapped into memory, count as the process's own."""


class TensorFiles:
    """Reads slices of tensors by name. Besides what it returns, it holds at most about `_MAPPED_BYTES`."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._file_of: dict[str, Path] = {}
        self._opened: dict[Path, Any] = {}
        self._num_mapped = 0
        for file in files:
            self._file_of |= dict.fromkeys(self._open(file).keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._slice(name).get_shape())

    def whole(self, name: str) -> Tensor:
        """A tensor. It is a view of a mapped file."""
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        self._count(tensor)
        return tensor

    def pieces(self, name: str, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Rows `start` to `stop` of a tensor, a few at a time, each with the index of its first row."""
        if start >= stop:
            return
        num_rows = max(1, PIECE_BYTES // max(1, self._slice(name)[start : start + 1].nbytes))
        for first in range(start, stop, num_rows):
            rows: Tensor = self._slice(name)[first : min(first + num_rows, stop)]
            yield first, rows
            self._count(rows)

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._opened.clear()
        self._num_mapped = 0

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]

    def _count(self, tensor: Tensor) -> None:
        self._num_mapped += tensor.nbytes
        if self._num_mapped > _MAPPED_BYTES:
            self.close()
