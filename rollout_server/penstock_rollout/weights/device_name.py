"""How a worker's device is named among servers and publisher."""

from __future__ import annotations

from functools import cache

import torch


@cache
def device_uuid(device: torch.device) -> str:
    """`cpu`, or the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
