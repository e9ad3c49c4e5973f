"""The name by which publisher and servers refer to a worker's device."""

from __future__ import annotations

from functools import cache

import torch


@cache
def device_uuid(device: torch.device) -> str:
    """Return `cpu`, or the UUID of the GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
