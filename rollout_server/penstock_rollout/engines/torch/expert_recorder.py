"""Record which experts the routers of a mixture of experts choose, so that the learner can replay them.

A router of Hugging Face chooses with one call of `topk` over [tokens, experts]. The recorder listens to that call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from penstock.errors import ConfigError
from penstock.trajectory import ExpertIds

_TOP_K = (torch.topk, torch.Tensor.topk)
_KINDS = re.compile(r"Router|Gate$|Gating")
"""Part of the class names of routers."""


class ExpertRecorder:
    """Listens to the routers of one model. Raises ConfigError for a model without any."""

    def __init__(self, model: Any) -> None:
        self._num_layers: int = model.config.num_hidden_layers
        self._chosen: dict[int, torch.Tensor] = {}
        self._num_experts = 0
        for name, module in model.named_modules():
            layer = re.search(r"\.(\d+)\.", name)
            sizes = [weight.shape[0] for weight in module.parameters() if weight.dim() == 2 and weight.shape[0] > 1]
            if layer is not None and sizes and _KINDS.search(type(module).__name__):
                self._num_experts = sizes[0]
                module.forward = partial(self._route, int(layer.group(1)), module.forward)
        if not self._num_experts:
            raise ConfigError(
                f"learner.router.replay is set, but a model of type {model.config.model_type} has no routers; set it "
                "to false"
            )

    def take(self, num_rows: int) -> ExpertIds:
        """Return [rows, tokens, layers, top_k] of the last forward pass, which had this many rows of equal length."""
        num_tokens, top_k = next(iter(self._chosen.values())).shape
        experts = torch.zeros(num_tokens, self._num_layers, top_k, dtype=torch.int64)
        for layer, chosen in self._chosen.items():
            experts[:, layer] = chosen.cpu()
        self._chosen = {}
        small = experts.numpy().astype(np.uint8 if self._num_experts <= 256 else np.uint16)
        return small.reshape(num_rows, -1, self._num_layers, top_k)

    def _route(self, layer: int, forward: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        with _Listening(self._num_experts) as listening:
            output = forward(*args, **settings)
        if listening.chosen is not None:
            self._chosen[layer] = listening.chosen
        return output


class _Listening(TorchFunctionMode):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.chosen: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Group-limited routers call topk over groups too, on three dimensions or with another width.
        if func in _TOP_K and args[0].dim() == 2 and args[0].shape[-1] == self._num_experts:
            self.chosen = result[1]
        return result
