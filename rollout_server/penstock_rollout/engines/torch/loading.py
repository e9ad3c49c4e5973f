"""Load pushed weights into a Hugging Face model that serves."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch


@torch.no_grad()
def load_into(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors, named as in the model's folder, into the model.

    Where the model holds them in another form, such as fused experts, Hugging Face converts them as it does when it
    loads the folder. This takes the memory of a second model for a moment."""
    state = model.state_dict()
    if not tensors.keys() <= state.keys():
        config = deepcopy(model.config)
        converted = type(model).from_pretrained(None, config=config, state_dict=dict(tensors), dtype=model.dtype)
        tensors = converted.state_dict()
    for name, tensor in tensors.items():
        state[name].copy_(tensor)
