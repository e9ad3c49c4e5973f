"""Host arrays to the device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device. From pinned memory where that is a GPU, so that the host does not wait for the work that
    is under way there."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def filled_to_device(array: NDArray[Any] | None, device: torch.device) -> Tensor:
    """A batch's field that the controller fills in for the algorithms that need it, on the device."""
    assert array is not None, "the controller filled in what the algorithm needs"
    return to_device(array, device)
