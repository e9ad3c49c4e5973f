"""Copies of host arrays on the device, and of small tensors on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device. For a GPU it goes through pinned memory, so the host does not wait for running
    kernels."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def required_to_device(array: NDArray[Any] | None, device: torch.device) -> Tensor:
    """Copy a field of a batch that the controller must have filled in, because the algorithm needs it."""
    assert array is not None, "the controller did not fill in a field that the algorithm needs"
    return to_device(array, device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy small tensors to the host in one transfer: on a GPU that processes share, each transfer waits for a turn.

    They travel as float64, which holds float32 and integers below 2**53 exactly."""
    joined = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
