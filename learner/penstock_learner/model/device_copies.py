"""Copies of host arrays on the device."""

from __future__ import annotations

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
