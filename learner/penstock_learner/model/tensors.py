"""Tensors between host and device, whether they are finite, and the soft cap of attention scores and logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy the array to the device, through pinned memory, so that the host does not wait for running kernels."""
    tensor = torch.as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def required_to_device(array: NDArray[Any] | None, device: torch.device) -> Tensor:
    """Copy a field of a batch that the controller must have filled in, because the algorithm needs it."""
    assert array is not None, "the controller did not fill in a field that the algorithm needs"
    return to_device(array, device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy small tensors to the host in one transfer: on a shared GPU each transfer waits for a turn. They travel as
    float64, which holds float32 and integers below 2**53 exactly."""
    joined = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu()
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def first_nonfinite(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The name of the first tensor that holds a NaN or an infinity, or an empty text. Waits for the device once."""
    checked = [(name, tensor) for name, tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not checked:
        return ""
    finite = torch.stack([is_finite(tensor).to(checked[0][1].device) for _, tensor in checked]).tolist()
    return next((name for (name, _), each in zip(checked, finite, strict=True) if not each), "")


def is_finite(tensor: Tensor) -> Tensor:
    """A boolean on the tensor's device. Smallest and largest value cost a tenth of `isfinite`, and NaN is both."""
    smallest, largest = tensor.detach().aminmax()
    return smallest.isfinite() & largest.isfinite()


def soft_cap(values: Tensor, cap: float) -> Tensor:
    """`cap · tanh(values / cap)`, written as a sigmoid, which compiled kernels compute several times as fast. In
    float32 the two differ by about 1e-7 · cap."""
    return 2 * cap * torch.sigmoid(values * (2 / cap)) - cap
